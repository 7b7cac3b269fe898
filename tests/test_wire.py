"""Wires: what a format keeps of a value, where quantizing stands, what is sent, and that it trains as it should."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

import shardc
from passes.insert import Param, insert
from passes.layout import Layout
from passes.parse import parse
from passes.text import to_text
from passes.verify import verify
from passes.wire import LARGEST, Wires, dequantize, message_bytes, quantize
from shardc import _torch
from shardc.cost import step_bytes
from shardc.links import Device, Link
from shardc.lower import in_aten
from shardc.testing import run_ranks
from test_numerics import AllRanks
from training import Trained, batch, one_process, sharded, small
from world import run

SCALED = sorted(LARGEST)
STEP = {"fp8": 1 / 16, "int8": 1 / 254, "int4": 1 / 14}
"""Of a format, how far a number can be from the nearest: fp8 by its own size, the others by the block's largest."""


# Messages


@pytest.mark.parametrize("wire", SCALED)
@settings(max_examples=25, deadline=None)
@given(st.integers(1, 70), st.integers(1, 3), st.sampled_from([8, 16, 64]), st.integers(0, 10**6))
def test_a_message_keeps_each_number_to_a_step_of_its_block(
    wire: str, elements: int, pieces: int, block: int, seed: int
) -> None:
    x = torch.randn(pieces, elements, generator=torch.Generator().manual_seed(seed)) * 10.0 ** (seed % 7 - 3)
    message = quantize(x, wire, block, pieces)
    assert message.shape == (pieces, message_bytes(elements, wire, block))
    back = dequantize(message, wire, block, [pieces, elements], torch.float32)
    for numbers, restored in zip(x, back, strict=True):
        for part, found in zip(numbers.split(block), restored.split(block), strict=True):
            largest = part.abs() if wire == "fp8" else part.abs().max()
            floor = part.abs().max() * 2.0**-9 / 448  # of fp8, half of its smallest number
            assert ((part - found).abs() <= largest * STEP[wire] * 1.001 + floor).all()


@pytest.mark.parametrize("wire", SCALED)
def test_zeros_stay_zeros_and_what_is_not_finite_stays_so(wire: str) -> None:
    assert dequantize(quantize(torch.zeros(20), wire, 8, 1), wire, 8, [20], torch.float32).eq(0).all()
    x = torch.ones(3, 8)
    x[1, 3], x[2, 5] = torch.inf, torch.nan
    back = dequantize(quantize(x, wire, 8, 1), wire, 8, [3, 8], torch.float32)
    assert back[0].eq(1).all()
    assert not back[1].isfinite().all() and not back[2].isfinite().all()


@pytest.mark.parametrize("wire", SCALED)
def test_no_block_straddles_a_piece(wire: str) -> None:
    small, large = torch.full((4,), 1e-3), torch.full((4,), 1e3)
    back = dequantize(quantize(torch.stack([small, large]), wire, 8, 2), wire, 8, [2, 4], torch.float32)
    torch.testing.assert_close(back, torch.stack([small, large]), rtol=1e-6, atol=0)


def test_inductor_makes_the_same_messages() -> None:
    lines = []
    for i, wire in enumerate(SCALED):
        size = message_bytes(128, wire, 64)
        lines += [f"    m{i}: u8[4, {size}] = quantize(y, '{wire}', 64, 4)"]
        lines += [f"    d{i}: f32[32, 16] = shardc.dequantize(m{i}, '{wire}', 64, [32, 16], f32)"]
        lines += [f"    f{i}: f32[8, 16] = fold(d{i}, 4)"]
        lines += [f"    e{i}: f32[32, 16] = shardc.dequantize(m{i}, '{wire}', 64, [32, 16], f32)"]
    text = "def forward(x: f32[32, 16], z: f32[32, 16]):\n    y = add.Tensor(x, z)\n" + "\n".join(lines)
    graph = parse(text + "\n    return [m0, f0, e0, m1, f1, e1, m2, f2, e2]\n")
    module = fx.GraphModule(graph.owning_module or nn.Module(), graph)
    inputs = [torch.randn(32, 16), torch.randn(32, 16)]
    expected = fx.Interpreter(module).run(*inputs)
    found = _torch.compile_graph(in_aten(module))(list(inputs))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_what_messages_bring_is_summed_block_by_block_and_seen_in_its_shape_at_last() -> None:
    """Inductor would look up each number by its place in the shape, one at a time."""
    graph = parse(
        "def backward(m: u8[2, 272]):\n"
        "    d: f32[32, 16] = shardc.dequantize(m, 'int8', 64, [32, 16], f32)\n"
        "    f: f32[16, 16] = fold(d, 2)\n"
        "    return [f]\n"
    )
    in_aten(fx.GraphModule(graph.owning_module or nn.Module(), graph))
    *_, total, seen, output = graph.nodes
    assert (total.target, seen.target) == (torch.ops.aten.sum.dim_IntList, torch.ops.aten.as_strided.default)
    assert list(total.meta["val"].shape) == [1, 4, 64]
    assert output.args[0] == [seen]


# In the graph

MESH = (("gpu", 2), ("node", 2))
JOINT = """\
def joint(w: f32[8, 16], x: f32[2, 8], tangents_1: f32[2, 16]):
    ''
    y: f32[2, 16] = mm(x, w)
    t: f32[8, 2] = permute(x, [1, 0])
    g: f32[8, 16] = mm(t, tangents_1)
    return ([y], {'w': g})
"""


def inserted(rungs: tuple[int, int, int, int], gather: dict[str, str], reduce: dict[str, str]) -> fx.Graph:
    layout = Layout("w", (8, 16), MESH, *rungs)
    wires = Wires(tuple(gather.items()), tuple(reduce.items()), 8)
    param = Param(layout, torch.float32, torch.float32, torch.float32, 0.25, wires)
    graph = insert(parse(JOINT), {"w": param})
    verify({"w": layout}, joint=graph)
    return graph


def test_what_is_gathered_in_a_format_stays_in_it_on_inner_axes() -> None:
    assert_expected_inline(
        to_text(inserted((2, 1, 0, 2), {"node": "int8"}, {}), "joint"),
        """\
def joint(w: f32[2, 16], x: f32[2, 8], tangents_1: f32[2, 16]):
    ''
    quantize: u8[1, 48] = quantize(w, 'int8', 8, 1)
    all_gather: u8[2, 48] = all_gather(quantize, 'node', 2, purpose='gather', params=['w'], again=False, wire='int8')
    wait: u8[2, 48] = wait(all_gather)
    all_gather_1: u8[4, 48] = all_gather(wait, 'gpu', 2, purpose='gather', params=['w'], again=True, wire='int8')
    wait_1: u8[4, 48] = wait(all_gather_1)
    dequantize: f32[8, 16] = shardc.dequantize(wait_1, 'int8', 8, [8, 16], f32)
    y: f32[2, 16] = mm(x, dequantize)
    t: f32[8, 2] = permute(x, [1, 0])
    g: f32[8, 16] = mm(t, tangents_1)
    mul: f32[8, 16] = mul.Tensor(g, 0.25)
    return ([y], {'w': mul})
""",
    )


def test_a_reduce_is_exchanged_and_summed_in_float32_axis_by_axis() -> None:
    assert_expected_inline(
        to_text(inserted((0, 0, 2, 2), {}, {"gpu": "int8", "node": "int4"}), "joint"),
        """\
def joint(w: f32[8, 16], x: f32[2, 8], tangents_1: f32[2, 16]):
    ''
    y: f32[2, 16] = mm(x, w)
    t: f32[8, 2] = permute(x, [1, 0])
    g: f32[8, 16] = mm(t, tangents_1)
    mul: f32[8, 16] = mul.Tensor(g, 0.25)
    quantize: u8[2, 96] = quantize(mul, 'int8', 8, 2)
    all_to_all: u8[2, 96] = all_to_all(quantize, 'gpu', 2, purpose='reduce', params=['w'], wire='int8')
    wait: u8[2, 96] = wait(all_to_all)
    dequantize: f32[8, 16] = shardc.dequantize(wait, 'int8', 8, [8, 16], f32)
    fold: f32[4, 16] = fold(dequantize, 2)
    quantize_1: u8[2, 32] = quantize(fold, 'int4', 8, 2)
    all_to_all_1: u8[2, 32] = all_to_all(quantize_1, 'node', 2, purpose='reduce', params=['w'], wire='int4')
    wait_1: u8[2, 32] = wait(all_to_all_1)
    dequantize_1: f32[4, 16] = shardc.dequantize(wait_1, 'int4', 8, [4, 16], f32)
    fold_1: f32[2, 16] = fold(dequantize_1, 2)
    return ([y], {'w': fold_1})
""",
    )


def test_a_cast_is_a_wire_too() -> None:
    assert_expected_inline(
        to_text(inserted((0, 0, 2, 2), {}, {"node": "bf16"}), "joint"),
        """\
def joint(w: f32[8, 16], x: f32[2, 8], tangents_1: f32[2, 16]):
    ''
    y: f32[2, 16] = mm(x, w)
    t: f32[8, 2] = permute(x, [1, 0])
    g: f32[8, 16] = mm(t, tangents_1)
    mul: f32[8, 16] = mul.Tensor(g, 0.25)
    reduce_scatter: f32[4, 16] = reduce_scatter(mul, 'gpu', 2, purpose='reduce', params=['w'])
    wait: f32[4, 16] = wait(reduce_scatter)
    convert_element_type: bf16[4, 16] = prims.convert_element_type(wait, bf16)
    all_to_all: bf16[4, 16] = all_to_all(convert_element_type, 'node', 2, purpose='reduce', params=['w'], wire='bf16')
    wait_1: bf16[4, 16] = wait(all_to_all)
    convert_element_type_1: f32[4, 16] = prims.convert_element_type(wait_1, f32)
    fold: f32[2, 16] = fold(convert_element_type_1, 2)
    return ([y], {'w': fold})
""",
    )


BROKEN = """\
def joint(w: f32[4, 16], x: f32[2, 8], tangents_1: f32[2, 16]):
    q: u8[1, 96] = quantize(w, 'int8', 8, 1)
    a: u8[2, 96] = all_gather(q, 'gpu', 2, params=['w'], again=True, wire='int8')
    b: u8[2, 96] = wait(a)
    f: f32[8, 16] = shardc.dequantize(b, 'int8', 8, [8, 16], f32)
    y: f32[2, 16] = mm(x, f)
    t: f32[8, 2] = permute(x, [1, 0])
    g: f32[8, 16] = mm(t, tangents_1)
    r: u8[2, 96] = quantize(g, 'int8', 8, 2)
    c: u8[2, 96] = all_to_all(r, 'gpu', 2, params=['w'], wire='int8')
    d: u8[2, 96] = wait(c)
    e: f32[8, 16] = shardc.dequantize(d, 'int8', 8, [8, 16], f32)
    h: f32[4, 16] = fold(e, 2)
    return ([y], {'w': h})
"""


@pytest.mark.parametrize(
    ("line", "instead", "says"),
    [
        ("again=True, wire='int8'", "again=True", "law 7, wire: the gather all_gather over gpu of w carries int8"),
        ("again=True, wire='int8'", "again=True, wire='int4'", "law 7, wire: .* in int4 over gpu of w carries int8"),
        ("again=True, wire='int8'", "again=True, wire='int7'", "law 7, wire: .* names no format"),
        ("y: f32[2, 16] = mm(x, f)", "y: u8[2, 96] = neg(b)", "law 2, full when used: w is still in int8 in `b`"),
        ("return ([y], {'w': h})", "return ([y], {'w': e})", "law 3, reduced: .* as 2 pieces that are not summed"),
        ("fold(e, 2)", "fold(e, 4)", "law 3, folded: `h` comes before the pieces"),
    ],
)
def test_a_wire_that_is_not_what_it_says_is_an_error(line: str, instead: str, says: str) -> None:
    layout = Layout("w", (8, 16), (("gpu", 2),), 1, 1, 1, 1)
    verify({"w": layout}, joint=parse(BROKEN))
    with pytest.raises(shardc.Error, match=says):
        verify({"w": layout}, joint=parse(BROKEN.replace(line, instead)))


# In a plan

TWO_BY_TWO = shardc.Topology(node=2, gpu=2)
ZEROPP = shardc.Plan.hpz(
    TWO_BY_TWO, gather_wire={"node": "int8"}, reduce_wire={"node": "int4", "gpu": "int4"}, wire_block=8
)


def test_a_plan_with_wires_goes_through_json_and_says_them() -> None:
    assert shardc.Plan.from_json(ZEROPP.to_json()) == ZEROPP
    assert "gathers over node in int8, reduces over node in int4, reduces over gpu in int4" in str(ZEROPP)
    assert eval(repr(ZEROPP), {"Plan": shardc.Plan, "Topology": shardc.Topology}) == ZEROPP


def wires(plan: shardc.Plan, name: str, dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (16, 32)) -> Wires:
    return plan.wires(plan.layouts({name: (shape, True), "w": (shape, True)})[name], dtype)


def test_norms_biases_and_embeddings_travel_as_they_are_and_so_does_what_is_narrow_already() -> None:
    assert wires(ZEROPP, "layers.0.mlp.weight").up("node") == "int8"
    for name in ("layers.0.norm.weight", "layers.0.mlp.bias", "embed.weight"):
        assert wires(ZEROPP, name) == Wires()
    assert wires(ZEROPP, "steps", torch.int64) == Wires()
    narrow = replace_options(param_dtype=torch.bfloat16, gather_wire={"node": "bf16"}, reduce_wire={"node": "bf16"})
    assert wires(narrow, "w") == Wires()


def test_what_does_not_fill_a_block_travels_as_it_is() -> None:
    plan = replace_options(gather_wire={"node": "int8"}, reduce_wire={"node": "int4"}, wire_block=256)
    assert wires(plan, "w", shape=(16, 17)).up("node") == "int8"  # 68 elements a rank: 260 bytes for 272
    assert wires(plan, "w", shape=(16, 16)) == Wires((), (("node", "int4"),))  # 64: 260 bytes for 256, or 132
    assert wires(plan, "w", shape=(16, 8)) == Wires()


def test_blocks_that_no_shard_fills_are_an_error() -> None:
    plan = replace_options(gather_wire={"node": "int8"}, wire_block=1024)
    says = "wire_block is 1024, but no parameter has a shard that fills a block: the largest has 16 elements"
    with pytest.raises(shardc.Error, match=f"{says}(.|\\n)*wire_block=16"):
        shardc.trace(nn.Linear(8, 8, bias=False), plan, torch.zeros(2, 8))


def replace_options(**options: object) -> shardc.Plan:
    return shardc.Plan.zero3(TWO_BY_TWO, **options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"gather_wire": {"nodes": "int8"}}, "gather_wire names axis 'nodes'(.|\\n)*did you mean 'node'"),
        ({"gather_wire": {"node": "int3"}}, "gather_wire over 'node' is 'int3'(.|\\n)*did you mean"),
        ({"reduce_wire": "int8"}, "reduce_wire is 'int8'(.|\\n)*a format by axis"),
        ({"wire_block": 100}, "wire_block is 100(.|\\n)*a multiple of 8"),
        ({"wire_except": "*norm*"}, "wire_except is (.|\\n)*patterns on names"),
    ],
)
def test_a_wire_that_cannot_be_is_an_error(options: dict, says: str) -> None:
    with pytest.raises(shardc.Error, match=says):
        replace_options(**options)


def test_a_gradient_that_is_all_reduced_over_an_axis_has_no_wire_there() -> None:
    with pytest.raises(shardc.Error, match="gradients are all-reduced over it(.|\\n)*optim='all'"):
        shardc.Plan.hsdp(TWO_BY_TWO, reduce_wire={"node": "int4"})
    plan = replace_options(reduce_wire={"node": "int4"}, overrides={"w": dict(params="gpu", grads="gpu", optim="gpu")})
    assert wires(plan, "w", shape=(64, 64)).down("node") == ""
    assert wires(plan, "v", shape=(64, 64)).down("node") == "int4"


def test_scales_count_as_bytes() -> None:
    moved = step_bytes(ZEROPP, {"w": ((16, 32), torch.float32, True)}, 1)
    shard = 128 + 4 * 16  # 128 elements in int8, 16 blocks of 8
    assert moved["forward gather", "node"] == shard
    assert moved["forward gather", "gpu"] == 2 * shard
    assert moved["backward gather", "gpu"] == 2 * shard
    assert moved["reduce", "gpu"] == 128 + 4 * 32  # 256 elements in int4, to the other
    assert moved["reduce", "node"] == 64 + 4 * 16


# Numbers


def test_a_step_is_what_quantizing_by_hand_makes_of_it() -> None:
    """The weight shard by shard; each rank's gradient piece by piece, and the sums again on the next axis."""
    torch.manual_seed(0)
    model = nn.Linear(32, 16, bias=False)
    batches = [torch.randn(4, 32) for _ in range(4)]
    program = shardc.trace(model, ZEROPP, batches[0])
    w = model.weight.detach()
    pieces = [w[8 * gpu + 4 * node :][:4] for node in range(2) for gpu in range(2)]
    outs = run_ranks(program.forward, [[pieces[rank], batches[rank]] for rank in range(4)], node=2, gpu=2)
    seen = torch.cat([through(piece, "int8", 1) for piece in (pieces[0], pieces[2], pieces[1], pieces[3])])
    for (out,), x in zip((out[0] for out in outs), batches, strict=True):
        torch.testing.assert_close(out, x @ seen.T)
    tangents = [torch.randn(4, 16) for _ in range(4)]
    inputs = [[*outs[rank][1], tangents[rank]] for rank in range(4)]
    found = run_ranks(program.variation(synced=True, accumulated={}), inputs, node=2, gpu=2)
    local = [through(t.T @ x / 4, "int4", 2) for t, x in zip(tangents, batches, strict=True)]
    for rank in range(4):
        node, gpu = divmod(rank, 2)
        sums = [sum(local[2 * n + g][8 * gpu :][:8] for g in range(2)) for n in range(2)]
        expected = sum(through(it, "int4", 2)[4 * node :][:4] for it in sums)
        torch.testing.assert_close(found[rank]["weight"], expected)


def through(x: Tensor, wire: str, pieces: int) -> Tensor:
    return dequantize(quantize(x, wire, 8, pieces), wire, 8, list(x.shape), torch.float32)


STEPS = (1, 2, 2)
IN_WIRES = {
    "ZeRO-3": shardc.Plan.zero3(TWO_BY_TWO, gather_wire={"node": "fp8"}, reduce_wire={"gpu": "int8"}, wire_block=8),
    "ZeRO++": ZEROPP,
    "IIG": shardc.Plan.paro(
        TWO_BY_TWO, "IIG", gather_wire={"node": "int8"}, reduce_wire={"node": "bf16"}, wire_block=8
    ),
    "Frontier": shardc.Plan.frontier(shardc.Topology(node=2, gpu=2, gcd=2), wire_block=8),
}


@pytest.mark.parametrize("plan", IN_WIRES.values(), ids=IN_WIRES)
def test_a_quantized_plan_trains_nearly_as_one_process(plan: shardc.Plan) -> None:
    ranks = AllRanks(plan)
    expected = one_process(plan.topology.world, STEPS)
    for step, count in enumerate(STEPS):
        assert ranks.step(step, count) == pytest.approx(expected.losses[step], rel=0.02)
        ranks.update()


def trained(name: str, backend: str) -> Trained:
    return sharded(IN_WIRES[name], STEPS, backend)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "backend"), [("ZeRO++", "inductor"), ("IIG", "eager")])
def test_real_processes_and_inductor_make_of_it_what_the_graphs_say(name: str, backend: str) -> None:
    ranks = AllRanks(IN_WIRES[name])
    losses = []
    for step, count in enumerate(STEPS):
        losses.append(ranks.step(step, count))
        ranks.update()
    assert run(trained, 4, name, backend)[0].losses == pytest.approx(losses, rel=1e-5)


def test_explain_says_in_what_hops_travel_and_what_does_not() -> None:
    topology = TWO_BY_TWO.with_links(Device("d", 1.0, 1.0, 1.0), node=Link(1.0, 1.0), gpu=Link(1.0, 1.0))
    plan = shardc.Plan.zeropp(topology, wire_block=8)
    said = shardc.trace(small(), plan, *batch(0, 0, 0)).explain()
    assert "all_gather in int8" in said and "all_to_all in int4" in said
    assert "as they are: embed.weight: wire_except has '*embed*'" in said
    assert "blocks.0.norm.weight, blocks.0.norm.bias: wire_except has '*norm*'" in said
    said = shardc.trace(small(), shardc.Plan.zeropp(topology), *batch(0, 0, 0)).explain()
    assert "as they are: unused, blocks.0.gain and 4 others: too few elements a shard to fill blocks of 256" in said
