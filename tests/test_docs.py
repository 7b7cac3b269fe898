"""The pages show plans and commands as code; here they are run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import shardc
from shardc import Plan

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TOPOLOGY = shardc.Topology(node=2, gpu=4)


def plans() -> list[str]:
    """All in backticks that makes a plan, or that are options of one."""
    quoted = [code for page in PAGES for code in re.findall(r"`([^`\n]+)`", page.read_text())]
    calls = [code for code in quoted if re.match(r"(shardc\.)?Plan[.\w]*\(topology", code)]
    options = [f"Plan.zero3(topology, {code})" for code in quoted if re.match(r"(overrides|\w+_dtype)=", code)]
    return sorted({*calls, *options})


@pytest.mark.parametrize("code", plans())
def test_a_plan_on_the_pages_is_legal(code: str) -> None:
    plan = eval(code, {"shardc": shardc, "Plan": Plan, "topology": TOPOLOGY, "torch": torch})
    assert isinstance(plan, Plan)


def test_the_pages_show_plans() -> None:
    assert len(plans()) > 8


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)", page.read_text()) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_readme_names_every_file() -> None:
    table = (ROOT / "README.md").read_text().partition("## Files")[2].partition("## Credits")[0]
    named = set(re.findall(r"`([\w/]+\.py)`", table)) - {"train_gpt.py"}
    files = {str(file.relative_to(ROOT)) for folder in ("shardc", "passes") for file in (ROOT / folder).glob("*.py")}
    assert sorted(name for name in files - named if not name.endswith("__init__.py")) == []
    assert sorted(named - files) == []
