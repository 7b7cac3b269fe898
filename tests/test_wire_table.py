"""Tables of `examples/bench/wire.py`, from records as its jobs leave them."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[1] / "examples" / "bench"


def record(row: str, step_s: float, **more: Any) -> dict[str, Any]:
    where = {"layout": "2x1", "rate": "100mbit", "micro_batches": 1}
    return {"row": row, **where, "steps_s": [step_s], "peak_bytes": 1, "plan": "a plan", **more}


def test_a_row_that_was_run_after_the_turns_is_not_missed_in_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(BENCH), *sys.path])
    wire_table = importlib.import_module("wire_table")
    records = [
        record("shardc-NIG", 2.0),
        record("planner", 2.0),
        record("turns/planner", 2.0, turns_s={"planner": [2.1], "shardc-NIG": [2.0]}),
        record("shardc-zero3", 1.0),
    ]
    *_, choice, in_turns = wire_table.Table(records, wire_table.Setting("2x1", "100mbit", 1)).summary()
    assert choice.endswith("+100.0% against shardc-zero3, the fastest of those that fit")
    assert in_turns.endswith("planner +5.0% against shardc-NIG, the fastest of those that fit")
