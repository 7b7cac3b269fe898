"""The command line, as a person would use it on the text of a bug report."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest
from expecttest import assert_expected_inline

from passes.text import to_text
from shardc.__main__ import main
from test_goldens import trace

JOINT = """\
def joint(layers_0_w: f32[4, 4], x: f32[2, 8], tangents_1: f32[2, 4]):
    'layers.0'
    a: f32[8, 4] = all_gather(layers_0_w, 'gpu', 2, params=['layers.0.w'], again=True)
    f: f32[8, 4] = wait(a)
    y: f32[2, 4] = mm(x, f)
    t: f32[8, 2] = permute(x, [1, 0])
    g: f32[8, 4] = mm(t, tangents_1)
    r: f32[4, 4] = reduce_scatter(g, 'gpu', 2, params=['layers.0.w'])
    s: f32[4, 4] = wait(r)
    return ([y], {'layers.0.w': s})
"""
BACKWARD = """\
def backward(x: f32[2, 8], tangents_1: f32[2, 4]):
    t: f32[8, 2] = permute(x, [1, 0])
    g: f32[8, 4] = mm(t, tangents_1)
    r: f32[4, 4] = reduce_scatter(g, 'gpu', 2, params=['layers.0.w'])
    s: f32[4, 4] = wait(r)
    n: f32[8, 4] = neg(g)
    return {'layers.0.w': s, 'x': n}
"""


@pytest.fixture
def opt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs `opt` on a text: exit status, stdout, stderr."""

    def run(text: str, *options: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        status = main(["opt", *options])
        return (status, *capsys.readouterr())

    return run


def test_opt_runs_all_stages_that_follow(opt) -> None:
    status, out, _ = opt(JOINT, "--after", "insert", "--verify")
    assert status == 0
    assert_expected_inline(
        out,
        """\
def region_0(x0: f32[2, 8], x1: f32[8, 4]):
    y: f32[2, 4] = mm(x0, x1)
    return (y,)

def forward(layers_0_w: f32[4, 4], x: f32[2, 8]):
    'layers.0'
    a: f32[8, 4] = all_gather(layers_0_w, 'gpu', 2, params=['layers.0.w'], again=True)
    f: f32[8, 4] = wait(a)
    region_0 = region_0(x, f)
    y: f32[2, 4] = region_0[0]
    t: f32[8, 2] = permute(x, [1, 0])
    return ([y], [t])

def region_1(x0: f32[8, 2] @ [1, 8], x1: f32[2, 4]):
    g: f32[8, 4] = mm(x0, x1)
    return (g,)

def backward(t: f32[8, 2] @ [1, 8], tangents_1: f32[2, 4]):
    'layers.0'
    region_1 = region_1(t, tangents_1)
    g: f32[8, 4] = region_1[0]
    r: f32[4, 4] = reduce_scatter(g, 'gpu', 2, params=['layers.0.w'])
    s: f32[4, 4] = wait(r)
    return {'layers.0.w': s}
""",
    )


def test_opt_stops_where_it_is_told(opt) -> None:
    assert_expected_inline(
        opt(JOINT, "--after", "insert", "--until", "partition")[1],
        """\
def forward(layers_0_w: f32[4, 4], x: f32[2, 8]):
    'layers.0'
    a: f32[8, 4] = all_gather(layers_0_w, 'gpu', 2, params=['layers.0.w'], again=True)
    f: f32[8, 4] = wait(a)
    y: f32[2, 4] = mm(x, f)
    t: f32[8, 2] = permute(x, [1, 0])
    return ([y], [t])

def backward(t: f32[8, 2] @ [1, 8], tangents_1: f32[2, 4]):
    'layers.0'
    g: f32[8, 4] = mm(t, tangents_1)
    r: f32[4, 4] = reduce_scatter(g, 'gpu', 2, params=['layers.0.w'])
    s: f32[4, 4] = wait(r)
    return {'layers.0.w': s}
""",
    )


def test_opt_takes_one_half(opt) -> None:
    status, out, _ = opt(BACKWARD, "--after", "partition", "--until", "schedule", "--verify")
    assert status == 0
    assert_expected_inline(
        out,
        """\
def backward(x: f32[2, 8], tangents_1: f32[2, 4]):
    t: f32[8, 2] = permute(x, [1, 0])
    g: f32[8, 4] = mm(t, tangents_1)
    r: f32[4, 4] = reduce_scatter(g, 'gpu', 2, params=['layers.0.w'])
    n: f32[8, 4] = neg(g)
    s: f32[4, 4] = wait(r)
    return {'layers.0.w': s, 'x': n}
""",
    )


def test_opt_takes_a_graph_that_trains_nothing(opt) -> None:
    text = "def joint(x: f32[4]):\n    y: f32[4] = relu(x)\n    return ([y], {})\n"
    forward = text.replace("joint", "forward").replace("{}", "[]")
    assert opt(text, "--after", "insert", "--until", "schedule") == (0, forward, "")


@pytest.mark.parametrize("plan", ["zero3", "hpz", "iig", "ddp"])
def test_opt_does_to_the_text_what_shardc_does_to_the_graph(opt, plan: str) -> None:
    program = trace(plan)
    text = to_text(program.after("insert")[0], "joint")
    assert opt(text, "--after", "insert", "--until", "schedule", "--verify") == (0, program.text(), "")


def test_a_text_that_is_none_is_refused(opt) -> None:
    status, out, error = opt("def forward(x: f32[4]):\n    y = foo(x)\n    return [y]", "--after", "schedule")
    assert (status, out) == (1, "")
    assert error == (
        "unknown op `foo`\n  at: line 2: y = foo(x)\n"
        "  fix: ops are spelled mm, add.Tensor, prims.iota, higher_order.cond, operator.mul\n"
    )


def test_a_half_with_hops_of_parameters_that_it_does_not_return(opt) -> None:
    gathers = """\
    a: f32[4, 4] = all_gather(v, 'gpu', 2, params=['v'], again=True)
    b: f32[4, 4] = wait(a)
    c: f32[4, 4] = all_gather(u, 'gpu', 2, params=['u'], again=True)
    d: f32[4, 4] = wait(c)
    e: f32[4, 4] = mm(b, d)
    return {'layers.0.w': s, 'x': e}
"""
    text = BACKWARD.replace("(x:", "(v: f32[2, 4], u: f32[2, 4], x:").partition("    n: ")[0] + gathers
    status, out, _ = opt(text, "--after", "partition", "--until", "bucket")
    assert status == 0
    assert "params=['v', 'u']" in out


def test_a_stage_that_does_not_follow_is_refused(opt) -> None:
    status, _, error = opt(BACKWARD, "--after", "schedule", "--until", "partition")
    assert status == 1
    assert error == (
        "Stage partition does not follow schedule.\n  fix: The stages: insert, partition, bucket, schedule, regions.\n"
    )


BROKEN = {
    "a second wait": (
        JOINT.replace("    y:", "    e: f32[8, 4] = wait(a)\n    y:"),
        "law 1, waited once: the gather all_gather over gpu of layers.0.w has 2 waits",
    ),
    "a gather of what is full": (
        JOINT.replace("    y:", "    e = all_gather(f, 'gpu', 2, params=['layers.0.w'])\n    h = wait(e)\n    y:"),
        "law 2, outer first: layers.0.w is gathered over gpu, over which it is not sharded any more",
    ),
    "a shard that is used": (JOINT.replace("return ([y]", "return ([y, layers_0_w]"), "law 2"),
    "a gradient that is squared on its way": (
        JOINT.replace("    return", "    q = mul.Tensor(s, s)\n    return").replace(
            "'layers.0.w': s", "'layers.0.w': q"
        ),
        "law 3",
    ),
}


@pytest.mark.parametrize(("text", "message"), BROKEN.values(), ids=BROKEN)
def test_verify_refuses_a_graph_that_breaks_a_law(opt, text: str, message: str) -> None:
    status, out, error = opt(text, "--after", "insert", "--verify")
    assert (status, out) == (1, "")
    assert error.startswith(message)


def test_verify_says_when_layouts_cannot_be_read(opt) -> None:
    status, _, error = opt(JOINT.replace("'gpu', 2", "'gpu+node', 2"), "--after", "insert", "--verify")
    assert status == 1
    assert error.startswith("layouts cannot be read from a hop over several axes or parameters\n  at: a: f32[8, 4] = ")


@pytest.mark.slow
def test_the_module_runs() -> None:
    command = [sys.executable, "-m", "shardc", "opt", "--after", "schedule"]
    run = subprocess.run(command, input=BACKWARD, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.startswith("def region_0(x0: f32[2, 8], x1: f32[2, 4]):\n")
