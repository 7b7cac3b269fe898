"""What people look at: the table of collectives, the pictures, and the commands that make them."""

from __future__ import annotations

import json
import re
import shutil
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import shardc
from passes import ops
from passes.errors import Error
from passes.parse import parse
from shardc.__main__ import main
from shardc.draw import dot_source
from shardc.links import Link
from shardc.program import Program
from test_simulate import PLANS, TOPOLOGY, Blocks

TWO_LAYERS = """\
def forward(w: f32[2, 4], v: f32[2, 4], x: f32[4, 4]):
    'layers.0'
    a: f32[4, 4] = all_gather(w, 'gpu', 2, params=['layers.0.w'])
    f: f32[4, 4] = wait(a)
    y: f32[4, 4] = mm(x, f)
    'layers.1'
    b: f32[4, 4] = all_gather(v, 'gpu', 2, params=['layers.1.w'])
    g: f32[4, 4] = wait(b)
    z: f32[4, 4] = mm(y, g)
    return [z]
"""


@cache
def traced(plan: str) -> Program:
    return shardc.trace(Blocks(), PLANS[plan], torch.empty(32, 64, dtype=PLANS[plan].param_dtype), keep=False)


# The table


def rows(text: str) -> list[list[str]]:
    """Cells of the table below the summary."""
    table = text.partition("\n\n")[2].splitlines()[1:]
    return [re.split(r"  +", line) for line in table]


def test_unfolded_the_table_has_a_line_a_collective() -> None:
    program = traced("zero3")
    starts = [start for variant in program.step() for start in ops.hops(program.graph(variant))]
    assert len(rows(program.explain(fold=False))) == len(starts)


def test_equal_layers_that_fare_alike_are_one_line() -> None:
    folded = rows(traced("zero3").explain())
    assert len(folded) < len(rows(traced("zero3").explain(fold=False)))
    assert any("like it" in row[1] for row in folded)


def test_a_line_says_what_is_moved_over_which_axis_and_how_much() -> None:
    first = next(row for row in rows(traced("zero3").explain(fold=False)) if row[3] == "node")
    assert first[:5] == [
        "forward",
        "gather layers.0.0.weight",
        "all_gather",
        "node",
        f"{64 * 64 * 4 / 8 / 1024:.2f} KiB",
    ]


def test_a_hop_of_one_parameter_says_why_it_is_in_no_bucket() -> None:
    by_name = {row[1]: row[-1] for row in rows(traced("zero3").explain(fold=False))}
    assert "not in a bucket: first" in by_name["gather layers.0.0.weight"]


def test_a_piece_says_why_it_is_one() -> None:
    free = TOPOLOGY.with_links(TOPOLOGY.computes, node=Link(0.05, 0.0), gpu=Link(0.5, 0.0))
    program = shardc.trace(Blocks(), shardc.Plan.zero3(free), torch.empty(32, 64), keep=False)
    by_name = {row[1]: row[-1] for row in rows(program.explain(fold=False))}
    assert "in pieces, so that the hops of its chain run side by side" in by_name["gather layers.0.0.weight 1/4"]


def test_what_is_exposed_has_a_reason() -> None:
    timeline = shardc.simulate(traced("zero3"))
    exposed = [e for e in timeline.events if e.exposed_us]
    with_reason = re.findall(r" us  .*(?:behind|longer|nothing|issued too late)", traced("zero3").explain(fold=False))
    assert exposed and len(with_reason) >= len(exposed)


def test_the_first_gather_of_a_step_has_nothing_to_hide_behind() -> None:
    text = traced("zero3").explain(fold=False)
    assert "nothing before it to hide behind" in text


# Pictures


def boxes(source: str) -> list[str]:
    return re.findall(r'^\s*(?:"?\w+"?) \[label="([^"]*)"', source, re.MULTILINE)


def test_equal_layers_are_drawn_once_and_say_how_many_they_are() -> None:
    source = dot_source(parse(TWO_LAYERS))
    assert "layers.0 ... layers.1  (2 equal layers)" in source
    assert source.count("gather over gpu") == 1


def test_unfolded_every_layer_is_drawn() -> None:
    source = dot_source(parse(TWO_LAYERS), fold=False)
    assert "equal layers" not in source
    assert source.count("gather over gpu") == 2


def test_a_layer_that_differs_is_not_folded() -> None:
    source = dot_source(parse(TWO_LAYERS.replace("all_gather(v, 'gpu'", "all_gather(v, 'node'")))
    assert source.count("gather over") == 2


def test_a_hop_says_its_axis_parameters_shapes_and_bytes() -> None:
    label = next(text for text in boxes(dot_source(parse(TWO_LAYERS))) if text.startswith("gather"))
    assert label.splitlines() == ["gather over gpu", "layers.0.w", "float32[2, 4] to [4, 4], 32 B sent"]


@pytest.mark.parametrize("plan", PLANS)
def test_every_hop_of_a_program_is_in_its_unfolded_picture(plan: str, tmp_path: Path) -> None:
    program = traced(plan)
    for picture, variant in zip(program.svg(tmp_path, fold=False), program.step(), strict=True):
        titles = " ".join("".join(text.itertext()) for text in ElementTree.parse(picture).getroot().iter())
        assert titles.count(" over ") >= len(ops.hops(program.graph(variant)))
        assert picture.with_suffix(".dot").read_text().startswith("digraph")


def test_a_deep_model_folds_to_a_small_picture(tmp_path: Path) -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(40))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = torch.relu(layer(x))
            return x.sum()

    program = shardc.trace(Deep(), PLANS["zero3"], torch.empty(4, 8), keep=False)
    forward = program.svg(tmp_path)[0]
    assert len(boxes(forward.with_suffix(".dot").read_text())) < 20


def test_without_a_renderer_the_source_is_written_and_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setitem(__import__("sys").modules, "pygraphviz", None)
    with pytest.raises(Error, match="pip install pygraphviz"):
        traced("zero3").svg(tmp_path)
    assert (tmp_path / "forward.dot").exists()


# Commands

GPT = ["--model", "gpt", "--layers", "2", "--sequence", "16", "--topology", "dgx-a100", "--plan"]


def test_simulate_prints_the_step_and_writes_what_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture, trace = tmp_path / "t.svg", tmp_path / "t.json"
    assert main(["simulate", *GPT, "IIG", "--svg", str(picture), "--trace", str(trace)]) == 0
    assert capsys.readouterr().out.startswith("step ")
    assert picture.exists() and json.loads(trace.read_text())["traceEvents"]


def test_explain_takes_plans_and_topologies_from_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    topology = shardc.Topology.preset("a800", nodes=2)
    shardc.Plan.hpz(topology).save(tmp_path / "plan.json")
    (tmp_path / "topology.json").write_text(json.dumps(topology.to_dict()))
    arguments = [*GPT, str(tmp_path / "plan.json")]
    arguments[arguments.index("dgx-a100")] = str(tmp_path / "topology.json")
    assert main(["explain", *arguments]) == 0
    assert "gather layers.0" in capsys.readouterr().out


def test_a_config_of_transformers_is_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "vocab_size": 50,
    }
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 7}))
    model = [f"hf:{tmp_path / 'config.json'}", "--layers", "2", "--sequence", "8", "--topology", "dgx-a100"]
    assert main(["explain", "--unfold", "--model", *model, "--plan", "zero3"]) == 0
    out = capsys.readouterr().out
    assert "model.layers.1" in out and "model.layers.2" not in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model", "gpt2", "--plan", "zero3", "--topology", "a800"], "There is no model 'gpt2'"),
        (["--model", "gpt", "--plan", "zero5", "--topology", "a800"], "There is no plan 'zero5'"),
        (["--model", "gpt", "--plan", "zero3", "--topology", "a801"], "did you mean 'a800'"),
        (["--model", "hf:none.json", "--plan", "zero3", "--topology", "a800"], "There is no none.json"),
        (["--model", "hf:BAD", "--plan", "zero3", "--topology", "a800"], "This file is no JSON"),
        (["--model", "hf:LIST", "--plan", "zero3", "--topology", "a800"], "holds a list"),
        (["--model", "hf:EMPTY", "--plan", "zero3", "--topology", "a800"], "model_type"),
    ],
)
def test_bad_input_is_one_error(
    arguments: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in {"BAD": "{", "LIST": "[]", "EMPTY": "{}"}.items():
        (tmp_path / name).write_text(text)
    arguments = [re.sub(r"hf:([A-Z]+)$", rf"hf:{tmp_path}/\1", argument) for argument in arguments]
    assert main(["simulate", *arguments]) == 1
    assert says in capsys.readouterr().err
