"""Every rule of the verifier: a graph that obeys it, one edit that breaks it, and the message."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from passes.errors import Error
from passes.layout import Layout
from passes.memory import lives, living, peak_bytes
from passes.parse import parse
from passes.verify import RULES, verify

MESH = (("gpu", 2), ("node", 2))
W = Layout("w", (8, 4), MESH, params=2, after_forward=1, grads=1, optim=2)
PADDED = replace(W, shape=(5, 4), after_forward=2)

GATHER = """\
    a = all_gather(w, 'node', 2, purpose='gather', params=['w'])
    b = wait(a)
    c = all_gather(b, 'gpu', 2, purpose='gather', params=['w'], again=True)
    f = wait(c)
"""
REDUCE = """\
    g = mm(t, tangents_1)
    m = mul.Tensor(g, 0.25)
    r = reduce_scatter(m, 'gpu', 2, purpose='reduce', params=['w'])
    s = wait(r)
"""
JOINT = f"""\
def forward(w: f32[2, 4], x: f32[2, 8], tangents_1: f32[2, 4]):
{GATHER}
    y = mm(x, f)
    t = permute(x, [1, 0])
{REDUCE}
    return ([y], {{'w': s}})
"""
FORWARD = f"""\
def forward(w: f32[2, 4], x: f32[2, 8]):
{GATHER}
    y = mm(x, f)
    return ([y], [x, b])
"""
BACKWARD = f"""\
def forward(x: f32[2, 8], b: f32[4, 4], tangents_1: f32[2, 4]):
    c = all_gather(b, 'gpu', 2, purpose='gather', params=['w'], again=True)
    f = wait(c)
    h = mm(tangents_1, permute_f)
    t = permute(x, [1, 0])
{REDUCE}
    return {{'w': s, 'x': h}}
""".replace("    h = mm", "    permute_f = permute(f, [1, 0])\n    h = mm")
SYNCED_BACKWARD = BACKWARD.replace(
    "tangents_1: f32[2, 4])", "tangents_1: f32[2, 4], accumulator_w: f32[4, 4])"
).replace(
    "    return {'w': s,",
    """\
    u = add.Tensor(accumulator_w, s)
    n = reduce_scatter(u, 'node', 2, purpose='sync', params=['w'])
    o = wait(n)
    return {'w': o,""",
)
REFRESHED = """\
def forward(w: f32[2, 4], x: bf16[2, 8]):
    v = prims.convert_element_type(w, bf16)
    d = all_gather(v, 'node', 2, purpose='refresh', params=['w'])
    e = wait(d)
    c = all_gather(e, 'gpu', 2, purpose='gather', params=['w'], again=True)
    f = wait(c)
    y = mm(x, f)
    return ([y], [x, e], {'w': e})
"""
PADDED_JOINT = """\
def forward(w: f32[2, 4], x: f32[2, 5], tangents_1: f32[2, 4]):
    a = all_gather(w, 'node', 2, purpose='gather', params=['w'], again=True)
    b = wait(a)
    c = all_gather(b, 'gpu', 2, purpose='gather', params=['w'], again=True)
    d = wait(c)
    f = compact(d, 5, [2, 2])
    y = mm(x, f)
    t = permute(x, [1, 0])
    g = mm(t, tangents_1)
    m = shardc.expand(g, 5, [2, 2])
    r = reduce_scatter(m, 'gpu', 2, purpose='reduce', params=['w'])
    s = wait(r)
    return ([y], {'w': s})
"""
REWOUND = """\
def forward(x: f32[2, 8], w: f32[2, 4], tangents_1: f32[2, 4]):
    a = all_gather(w, 'node', 2, purpose='gather', params=['w'])
    b = wait(a)
    return {}
"""
IN_PIECES = """\
def forward(w: f32[2, 4], x: f32[2, 8], tangents_1: f32[2, 4]):
    p = view(w, [1, 8])
    q = split_with_sizes(p, [4, 4], 1)
    q0 = q[0]
    q1 = q[1]
    a0 = all_gather(q0, 'node', 2, purpose='gather', params=['w'], piece=[0, 2])
    a1 = all_gather(q1, 'node', 2, purpose='gather', params=['w'], piece=[1, 2])
    b0 = wait(a0)
    b1 = wait(a1)
    c0 = all_gather(b0, 'gpu', 2, purpose='gather', params=['w'], again=True, piece=[0, 2])
    c1 = all_gather(b1, 'gpu', 2, purpose='gather', params=['w'], again=True, piece=[1, 2])
    d0 = wait(c0)
    d1 = wait(c1)
    e = cat([d0, d1], 1)
    f = view(e, [8, 4])
    y = mm(x, f)
    t = permute(x, [1, 0])
    g = mm(t, tangents_1)
    m = view(g, [2, 16])
    n = split_with_sizes(m, [8, 8], 1)
    n0 = n[0]
    o0 = clone(n0, memory_format=contiguous_format)
    n1 = n[1]
    o1 = clone(n1, memory_format=contiguous_format)
    r0 = reduce_scatter(o0, 'gpu', 2, purpose='reduce', params=['w'], piece=[0, 2])
    r1 = reduce_scatter(o1, 'gpu', 2, purpose='reduce', params=['w'], piece=[1, 2])
    s0 = wait(r0)
    s1 = wait(r1)
    u = cat([s0, s1], 1)
    s = view(u, [4, 4])
    return ([y], {'w': s})
"""
# Graphs by name: a joint graph, or a forward, or a forward and its backward.
GOOD = {
    "joint": [JOINT],
    "padded": [PADDED_JOINT],
    "pieces": [IN_PIECES],
    "forward": [FORWARD],
    "refreshed": [REFRESHED],
    "backward": [FORWARD, BACKWARD],
    "synced": [FORWARD, SYNCED_BACKWARD],
}
LAYOUTS = {"padded": PADDED, "refreshed": replace(W, params=1)}


def check(name: str, texts: list[str], limit: int | None = None) -> None:
    layouts, graphs = {"w": LAYOUTS.get(name, W)}, [parse(text) for text in texts]
    if name in ("joint", "padded", "pieces"):
        verify(layouts, joint=graphs[0], memory_limit_bytes=limit)
    else:
        verify(layouts, forward=graphs[0], backward=graphs[1] if graphs[1:] else None, synced=name == "synced")


def message(name: str, texts: list[str], limit: int | None = None) -> str:
    with pytest.raises(Error) as error:
        check(name, texts, limit)
    return str(error.value) + "\n"


@pytest.mark.parametrize("name", GOOD)
def test_good_graphs_pass(name: str) -> None:
    check(name, GOOD[name])


# The good graph, an edit that breaks it, the message.
BROKEN = {
    "waited once: no wait": (
        "joint",
        """\
    s = wait(r)

    return ([y], {'w': s})""",
        "    return ([y], {'w': m})",
        """\
law 1, waited once: the reduce reduce_scatter over gpu of w has 0 waits
  at: r: f32[4, 4] = reduce_scatter(m, 'gpu', 2, purpose='reduce', params=['w'])
  fix: give every start one wait, and use that; only another hop may take a result without
""",
    ),
    "waited once: two waits": (
        "joint",
        "    f = wait(c)",
        "    f = wait(c)\n    f2 = wait(c)",
        """\
law 1, waited once: the gather all_gather over gpu of w has 2 waits
  at: c: f32[8, 4] = all_gather(b, 'gpu', 2, purpose='gather', params=['w'], again=True)
  fix: give every start one wait, and use that; only another hop may take a result without
""",
    ),
    "waited once: used before": (
        "joint",
        "mm(x, f)",
        "mm(x, c)",
        """\
law 1, waited once: the gather all_gather over gpu of w is used by `y` before its wait
  at: c: f32[8, 4] = all_gather(b, 'gpu', 2, purpose='gather', params=['w'], again=True)
  fix: give every start one wait, and use that; only another hop may take a result without
""",
    ),
    "waits for a hop": (
        "joint",
        "    t = permute(x, [1, 0])",
        "    q = wait(x)\n    t = permute(x, [1, 0])",
        """\
law 1, waits for a hop: `q` waits for `x`, which is no hop
  at: q: f32[2, 8] = wait(x)
  fix: remove this wait
""",
    ),
    "on the mesh: size": (
        "joint",
        "(m, 'gpu', 2,",
        "(m, 'gpu', 4,",
        """\
law 5, on the mesh: the reduce reduce_scatter over gpu of w says 4 ranks
  at: r: f32[2, 4] = reduce_scatter(m, 'gpu', 4, purpose='reduce', params=['w'])
  fix: the axes are gpu=2, node=2
""",
    ),
    "on the mesh: axis": (
        "joint",
        "(w, 'node', 2,",
        "(w, 'rack', 2,",
        """\
law 5, on the mesh: the gather all_gather over rack of w is over no neighbouring axes of the mesh
  at: a: f32[4, 4] = all_gather(w, 'rack', 2, purpose='gather', params=['w'])
  fix: the axes are gpu=2, node=2, inner first
""",
    ),
    "on the mesh: order": (
        "joint",
        "(m, 'gpu', 2,",
        "(m, 'node+gpu', 4,",
        """\
law 5, on the mesh: the reduce reduce_scatter over node+gpu of w is over no neighbouring axes of the mesh
  at: r: f32[2, 4] = reduce_scatter(m, 'node+gpu', 4, purpose='reduce', params=['w'])
  fix: the axes are gpu=2, node=2, inner first
""",
    ),
    "moves: by kind": (
        "forward",
        "    return",
        """\
    q = all_reduce(y, 'gpu', 2, purpose='sync', params=['w'])
    p = wait(q)
    return""",
        """\
law 5, moves: a forward has no sync all_reduce over gpu of w
  at: q: f32[2, 4] = all_reduce(y, 'gpu', 2, purpose='sync', params=['w'])
  fix: its moves are: gather by all_gather
""",
    ),
    "moves: unsynced": (
        "joint",
        "purpose='reduce'",
        "purpose='sync'",
        """\
law 5, moves: a joint has no sync reduce_scatter over gpu of w
  at: r: f32[4, 4] = reduce_scatter(m, 'gpu', 2, purpose='sync', params=['w'])
  fix: its moves are: gather by all_gather, reduce by reduce_scatter, reduce by all_to_all
""",
    ),
    "named: another piece": (
        "pieces",
        "    a0 = all_gather(q0,",
        "    a0 = all_gather(q1,",
        """\
law 2, named: the gather all_gather over node of w, piece 1 of 2 carries piece 2 of 2
  at: a0: f32[2, 4] = all_gather(q1, 'node', 2, purpose='gather', params=['w'], piece=[0, 2])
  fix: give each part of a split to a hop of its number, of as many
""",
    ),
    "named: another piece of a gradient": (
        "pieces",
        "    o1 = clone(n1,",
        "    o1 = clone(n0,",
        """\
law 2, named: the reduce reduce_scatter over gpu of w, piece 2 of 2 carries piece 1 of 2
  at: r1: f32[1, 8] = reduce_scatter(o1, 'gpu', 2, purpose='reduce', params=['w'], piece=[1, 2])
  fix: give each part of a split to a hop of its number, of as many
""",
    ),
    "full when used: pieces in another order": (
        "pieces",
        "cat([d0, d1], 1)",
        "cat([d1, d0], 1)",
        """\
law 2, full when used: w is only piece 2 of 2 in `f`
  at: y: f32[2, 4] = mm(x, f)
  fix: first put all pieces together with `cat`, in order
""",
    ),
    "reduced: pieces in another order": (
        "pieces",
        "cat([s0, s1], 1)",
        "cat([s1, s0], 1)",
        """\
law 3, reduced: of the gradient of w only piece 2 of 2 is returned
  at: s: f32[4, 4] = view(u, [4, 4])
  fix: put all pieces together with `cat`, in order
""",
    ),
    "exchange: not saved": (
        "backward",
        "tangents_1: f32[2, 4])",
        "tangents_1: f32[2, 4], f2: f32[8, 4])",
        """\
law 4, exchange: the backward takes `f2`, which the forward does not save
  at: f2: f32[8, 4]
  fix: the forward saves 2 values; save it too, or name it tangents_... or accumulator_...
""",
    ),
    "exchange: type": (
        "backward",
        "(x: f32[2, 8]",
        "(x: bf16[2, 8]",
        """\
law 4, exchange: saved value 0 is `x: torch.float32 [2, 8]`, the backward takes torch.bfloat16 [2, 8]
  at: x: bf16[2, 8]
  fix: keep saved values and placeholders in the same order
""",
    ),
    "exchange: not taken": (
        "backward",
        "[x, b]",
        "[x, b, y]",
        """\
law 4, exchange: `y` is saved, but the backward does not take it
  at: y: f32[2, 4] = mm(x, f)
  fix: do not save it
""",
    ),
    "at rest": (
        "synced",
        "accumulator_w: f32[4, 4]",
        "accumulator_w: f32[1, 4]",
        """\
law 2, at rest: w comes in as [1, 4], not as [4, 4]
  at: accumulator_w: f32[1, 4]
  fix: 1 axes hold it at rest: make its placeholder [4, 4]
""",
    ),
    "outer first: order": (
        "joint",
        "    a = all_gather(w, 'node', 2, purpose='gather', params=['w'])",
        "    a = all_gather(w, 'gpu', 2, purpose='gather', params=['w'])",
        """\
law 2, outer first: w is gathered over gpu too early
  at: a: f32[4, 4] = all_gather(w, 'gpu', 2, purpose='gather', params=['w'])
  fix: gather over node, gpu, in this order
""",
    ),
    "outer first: twice": (
        "joint",
        "(b, 'gpu', 2",
        "(b, 'node', 2",
        """\
law 2, outer first: w is gathered over node, over which it is not sharded any more
  at: c: f32[8, 4] = all_gather(b, 'node', 2, purpose='gather', params=['w'], again=True)
  fix: gather over gpu, in this order
""",
    ),
    "named": (
        "joint",
        "(b, 'gpu', 2, purpose='gather', params=['w']",
        "(b, 'gpu', 2, purpose='gather', params=['v']",
        """\
law 2, named: the gather all_gather over gpu of v names no parameter of the plan
  at: c: f32[8, 4] = all_gather(b, 'gpu', 2, purpose='gather', params=['v'], again=True)
  fix: name one of w
""",
    ),
    "named: unknown": (
        "joint",
        "purpose='reduce', params=['w']",
        "purpose='reduce', params=['v']",
        """\
law 2, named: the reduce reduce_scatter over gpu of v names no parameter of the plan
  at: r: f32[4, 4] = reduce_scatter(m, 'gpu', 2, purpose='reduce', params=['v'])
  fix: name one of w
""",
    ),
    "gathered once": (
        "joint",
        "    y = mm(x, f)",
        """\
    a2 = all_gather(w, 'node', 2, purpose='gather', params=['w'])
    b2 = wait(a2)
    y = mm(x, f)""",
        """\
law 2, gathered once: w is gathered over node in `a` and again in `a2`
  at: a2: f32[4, 4] = all_gather(w, 'node', 2, purpose='gather', params=['w'])
  fix: use what `a` gathers
""",
    ),
    "within the move: gather": (
        "refreshed",
        "purpose='refresh'",
        "purpose='gather'",
        """\
law 2, within the move: the gather of w starts below its params rung
  at: d: bf16[4, 4] = all_gather(v, 'node', 2, purpose='gather', params=['w'])
  fix: refresh it up to there
""",
    ),
    "within the move: refresh": (
        "refreshed",
        "purpose='gather', params=['w'], again=True",
        "purpose='refresh', params=['w']",
        """\
law 2, within the move: the refresh of w goes on above its params rung
  at: c: bf16[8, 4] = all_gather(e, 'gpu', 2, purpose='refresh', params=['w'])
  fix: end it there
""",
    ),
    "compacted: too early": (
        "padded",
        "    d = wait(c)",
        "    d = wait(c)\n    q = compact(b, 5, [2, 2])",
        """\
law 2, compacted: w is compacted while sharded over gpu
  at: q: f32[5, 4] = compact(b, 5, [2, 2])
  fix: padding is part of every shard: compact the full value
""",
    ),
    "compacted: table": (
        "padded",
        "f = compact(d, 5, [2, 2])",
        "f = compact(d, 5, [4])",
        """\
law 2, compacted: the compact of w does not fit its padding
  at: f: f32[5, 4] = compact(d, 5, [4])
  fix: its rows and split are (5, (2, 2))
""",
    ),
    "full when used: sharded": (
        "joint",
        "    y = mm(x, f)",
        "    q = relu(b)\n    y = mm(x, f)",
        """\
law 2, full when used: w is still sharded over gpu in `b`
  at: q: f32[4, 4] = relu(b)
  fix: first gather over gpu
""",
    ),
    "full when used: padded": (
        "padded",
        "    y = mm(x, f)",
        "    q = relu(d)\n    y = mm(x, f)",
        """\
law 2, full when used: w is still padded in `d`
  at: q: f32[8, 4] = relu(d)
  fix: first compact(5, [2, 2])
""",
    ),
    "full when used: returned": (
        "forward",
        "([y],",
        "([y, b],",
        """\
law 2, full when used: w is still sharded over gpu in `b`
  at: return ([y, b], [x, b])
  fix: first gather over gpu
""",
    ),
    "copied": (
        "refreshed",
        "{'w': e}",
        "{'w': f}",
        """\
law 2, copied: the copy of w is not its shard on the params rung
  at: f: bf16[8, 4] = wait(c)
  fix: refresh it over node; it stays sharded over gpu
""",
    ),
    "on its way: axis": (
        "joint",
        "(m, 'gpu', 2, purpose='reduce'",
        "(m, 'node', 2, purpose='reduce'",
        """\
law 3, on its way: the gradient of w crosses node (reduce)
  at: r: f32[4, 4] = reduce_scatter(m, 'node', 2, purpose='reduce', params=['w'])
  fix: its way is reduce_scatter over gpu (reduce)
""",
    ),
    "on its way: twice": (
        "synced",
        "(u, 'node', 2, purpose='sync'",
        "(u, 'gpu', 2, purpose='sync'",
        """\
law 3, on its way: the gradient of w crosses gpu (reduce), gpu (sync)
  at: n: f32[2, 4] = reduce_scatter(u, 'gpu', 2, purpose='sync', params=['w'])
  fix: its way is reduce_scatter over gpu (reduce), then reduce_scatter over node (sync)
""",
    ),
    "expanded": (
        "padded",
        "    m = shardc.expand(g, 5, [2, 2])",
        "    m = constant_pad_nd(g, [0, 0, 0, 3])",
        """\
law 3, expanded: the gradient of w goes into its first hop without the padding of its shards
  at: r: f32[4, 4] = reduce_scatter(m, 'gpu', 2, purpose='reduce', params=['w'])
  fix: expand it to 8 rows first
""",
    ),
    "one sum: used": (
        "joint",
        "    s = wait(r)",
        "    s = wait(r)\n    q = relu(s)",
        """\
law 3, one sum: the gradient of w is used on its way
  at: q: f32[4, 4] = relu(s)
  fix: use it after its last hop
""",
    ),
    "one sum: squared": (
        "synced",
        "u = add.Tensor(accumulator_w, s)",
        "u = mul.Tensor(s, s)",
        """\
law 3, one sum: the gradient of w is used on its way
  at: u: f32[4, 4] = mul.Tensor(s, s)
  fix: use it after its last hop
""",
    ),
    "one sum: counted twice": (
        "synced",
        "u = add.Tensor(accumulator_w, s)",
        "u = add.Tensor(s, s)",
        """\
law 3, one sum: the gradient of w is used on its way
  at: u: f32[4, 4] = add.Tensor(s, s)
  fix: use it after its last hop
""",
    ),
    "one sum: mixed": (
        "synced",
        "u = add.Tensor(accumulator_w, s)",
        """\
k = mm(t, tangents_1)
    i = slice.Tensor(k, 0, 0, 4)
    u = add.Tensor(i, s)""",
        """\
law 3, one sum: `u` adds to the gradient of w what has not crossed the same axes
  at: u: f32[4, 4] = add.Tensor(i, s)
  fix: add before its first hop, or what has crossed gpu (reduce) too
""",
    ),
    "none lost": (
        "backward",
        "{'w': s, 'x': h}",
        "{'x': h}",
        """\
law 3, none lost: the gradient of w is reduced but not returned
  at: r: f32[4, 4] = reduce_scatter(m, 'gpu', 2, purpose='reduce', params=['w'])
  fix: return it
""",
    ),
    "reduced: not at all": (
        "joint",
        "{'w': s}",
        "{'w': g}",
        """\
law 3, reduced: the gradient of w is returned having crossed no axis
  at: g: f32[8, 4] = mm(t, tangents_1)
  fix: its way is reduce_scatter over gpu (reduce)
""",
    ),
    "reduced: not synced": (
        "synced",
        "{'w': o,",
        "{'w': u,",
        """\
law 3, reduced: the gradient of w is returned having crossed gpu (reduce)
  at: u: f32[4, 4] = add.Tensor(accumulator_w, s)
  fix: its way is reduce_scatter over gpu (reduce), then reduce_scatter over node (sync)
""",
    ),
    "again: not marked": (
        "forward",
        "params=['w'], again=True",
        "params=['w']",
        """\
law 4, again: the gather of w over gpu is not marked `again`
  at: c: f32[8, 4] = all_gather(b, 'gpu', 2, purpose='gather', params=['w'])
  fix: the backward gathers it over gpu, and that is what `again` marks
""",
    ),
    "again: marked": (
        "joint",
        "    a = all_gather(w, 'node', 2, purpose='gather', params=['w'])",
        "    a = all_gather(w, 'node', 2, purpose='gather', params=['w'], again=True)",
        """\
law 4, again: the gather of w over node is marked `again`
  at: a: f32[4, 4] = all_gather(w, 'node', 2, purpose='gather', params=['w'], again=True)
  fix: the backward gathers it over gpu, and that is what `again` marks
""",
    ),
    "again: across the rung": (
        "joint",
        """\
    a = all_gather(w, 'node', 2, purpose='gather', params=['w'])
    b = wait(a)
    c = all_gather(b, 'gpu', 2, purpose='gather', params=['w'], again=True)
    f = wait(c)
""",
        """\
    c = all_gather(w, 'gpu+node', 4, purpose='gather', params=['w'], again=True)
    d = wait(c)
    f = interleave(d, [2, 2])
""",
        """\
law 4, again: the gather of w over gpu+node crosses its after_forward rung
  at: c: f32[8, 4] = all_gather(w, 'gpu+node', 4, purpose='gather', params=['w'], again=True)
  fix: end a hop there, so that the backward can start from it
""",
    ),
    "saved: full": (
        "forward",
        "[x, b]",
        "[x, f]",
        """\
law 4, saved: `f` is saved, though it is computed from w alone
  at: f: f32[8, 4] = wait(c)
  fix: save the shards on the after_forward rung and compute it again
""",
    ),
    "saved: computed from full": (
        "forward",
        "    return ([y], [x, b])",
        """\
    k = full([8, 4], 2.0)
    q = mul.Tensor(f, k)
    return ([y], [x, b, q])""",
        """\
law 4, saved: `q` is saved, though it is computed from w alone
  at: q: f32[8, 4] = mul.Tensor(f, k)
  fix: save the shards on the after_forward rung and compute it again
""",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_graphs_raise(name: str) -> None:
    kind, old, new, expected = BROKEN[name]
    assert any(old in text for text in GOOD[kind])
    assert message(kind, [text.replace(old, new) for text in GOOD[kind]]) == expected


def test_backward_gathers_only_above_after_forward() -> None:
    found = message("backward", [FORWARD.replace("[x, b]", "[x, w]"), REWOUND])
    assert (
        found
        == """\
law 4, repeats: the backward gathers w over node, which the forward has done for both
  at: a: f32[4, 4] = all_gather(w, 'node', 2, purpose='gather', params=['w'])
  fix: save what the forward gathered; the backward gathers it over gpu, and that is what `again` marks
"""
    )


def test_memory_stays_under_the_limit() -> None:
    # w, x and tangents_1 are 32 + 64 + 32 bytes; at y, the full w, y itself and nothing else are there.
    check("joint", GOOD["joint"], limit=448)
    assert (
        message("joint", GOOD["joint"], limit=300)
        == """\
law 6, memory: the joint needs 416 bytes, the limit is 300; largest there: g 128, m 128, x 64, w 32, tangents_1 32
  at: m: f32[8, 4] = mul.Tensor(g, 0.25)
  fix: raise the limit, shard more, or save less (activation_budget)
"""
    )


def test_every_rule_is_broken_here() -> None:
    elsewhere = {"repeats", "memory", "wire", "folded", "interleaved"}  # the last three in test_wire and test_fuse
    assert {rule.name for rule in RULES} == {name.partition(":")[0] for name in BROKEN} | elsewhere


def test_a_backward_needs_its_forward() -> None:
    with pytest.raises(ValueError, match="with its forward"):
        verify({"w": W}, backward=parse(BACKWARD))


def test_axes_of_size_one_have_no_hops() -> None:
    mesh = (("gpu", 2), ("rack", 1), ("node", 2))
    verify({"w": replace(W, axes=mesh, params=3, after_forward=2, grads=2, optim=3)}, forward=parse(FORWARD))


def test_a_hop_may_take_neighbouring_axes_at_once() -> None:
    text = JOINT.replace(GATHER, FLAT)
    verify({"w": replace(W, after_forward=2)}, joint=parse(text))


def test_a_bucket_carries_the_shards_that_it_names() -> None:
    layouts = {name: replace(W, name=name, params=1, after_forward=1) for name in ("w", "v")}
    verify(layouts, forward=parse(BUCKET))
    with pytest.raises(Error, match="named: the gather all_gather over gpu of v, w carries w, v"):
        verify(layouts, forward=parse(BUCKET.replace("['w', 'v']", "['v', 'w']")))


def test_views_waits_and_outputs_count_once() -> None:
    graph = parse(VIEWS)
    bytes_, node = peak_bytes(graph)
    assert (bytes_, node.name) == (16 + 32 + 32, "y")
    assert [(life.node.name, life.bytes) for life in living(graph, node)] == [("a", 32), ("y", 32), ("w", 16)]


def test_a_view_is_of_what_it_is_taken_from_whatever_stood_there_before() -> None:
    graph = parse(CHAIN)
    y, output = next(n for n in graph.nodes if n.name == "y"), graph.output_node()
    with graph.inserting_before(output):
        turned = graph.call_function(torch.ops.aten.t.default, (y,))
    turned.meta["val"] = torch.empty_like(y.meta["val"])  # with a storage of its own
    assert any(life.values == {y, turned} for life in lives(graph))


def test_saved_values_may_be_given_up() -> None:
    graph = parse(CHAIN)
    x = next(iter(graph.nodes))
    assert peak_bytes(graph)[0] == 3 * 16
    assert peak_bytes(graph, given_up=[x])[0] == 2 * 16


def test_thirty_thousand_nodes_in_linear_time() -> None:
    graph = parse(FORWARD)
    y, output = next(n for n in graph.nodes if n.name == "y"), graph.output_node()
    with graph.inserting_before(output):
        for _ in range(30_000):
            y = graph.call_function(torch.ops.aten.relu.default, (y,))
            y.meta["val"] = y.args[0].meta["val"]
    start = time.perf_counter()
    verify({"w": W}, forward=graph)
    assert time.perf_counter() - start < 1.5


FLAT = """\
    c = all_gather(w, 'gpu+node', 4, purpose='gather', params=['w'], again=True)
    d = wait(c)
    f = interleave(d, [2, 2])
"""
BUCKET = """\
def forward(w: f32[4, 4], v: f32[4, 4], x: f32[2, 8]):
    w1 = view(w, [1, 16])
    v1 = view(v, [1, 16])
    p = cat([w1, v1], 1)
    a = all_gather(p, 'gpu', 2, purpose='gather', params=['w', 'v'], again=True)
    b = wait(a)
    s = split_with_sizes(b, [16, 16], 1)
    s0 = s[0]
    s1 = s[1]
    w2 = reshape(s0, [8, 4])
    v2 = reshape(s1, [8, 4])
    y = mm(x, w2)
    z = mm(x, v2)
    return ([y, z], [x])
"""
VIEWS = """\
def forward(w: f32[1, 4]):
    a = all_gather(w, 'gpu', 2, params=['w'])
    f = wait(a)
    v = view(f, [8])
    y = relu(v)
    return [y]
"""
CHAIN = """\
def forward(x: f32[4]):
    y = relu(x)
    z = relu(y)
    return [z]
"""
