"""Options of the test run, and the matrix of models at its end."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-goldens", action="store_true", help="write the golden texts of tests/goldens anew")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Tables that tests recorded."""
    for report in terminalreporter.stats.get("passed", []) + terminalreporter.stats.get("failed", []):
        for name, table in report.user_properties if report.when == "call" else ():
            terminalreporter.section(name)
            terminalreporter.write_line(table)
