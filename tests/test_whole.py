"""`backend="inductor-whole"`: Inductor keeps the order of the graph, as far as collectives go.

What is left to Inductor: elementwise compute is generated where its result is used, so it may slip behind a hop that it
was in front of. Matrix products stay where they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import fx
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from passes import ops
from passes.parse import parse
from shardc import _torch
from shardc.lower import Lowering

# Nothing but the order keeps a wait from its start, a start from its turn, a product from the hops around it.
GRAPH = """\
def forward(w: f32[4, 32], v: f32[4, 32], u: f32[4, 32], x: f32[16, 32], p: f32[32, 16]):
    a: f32[8, 32] = all_gather(w, 'node', 2, params=['w'])
    b: f32[8, 32] = wait(a)
    c: f32[16, 32] = all_gather(b, 'gpu', 2, params=['w'])
    d: f32[8, 32] = all_gather(v, 'node', 2, params=['v'])
    m: f32[16, 16] = mm(x, p)
    e: f32[16, 32] = wait(c)
    f: f32[8, 32] = wait(d)
    g: f32[16, 32] = all_gather(f, 'gpu', 2, params=['v'])
    y: f32[16, 32] = mm(m, e)
    r: f32[16, 32] = relu(y)
    s: f32[8, 32] = reduce_scatter(r, 'gpu', 2, params=['w'])
    t: f32[32, 16] = permute(y, [1, 0])
    h: f32[32, 32] = mm(t, r)
    k: f32[16, 32] = wait(g)
    z: f32[16, 32] = mm(k, h)
    i: f32[8, 32] = all_gather(u, 'node', 2, params=['u'])
    n: f32[4, 32] = all_reduce(w, 'node', 2, params=['w'])
    o: f32[16, 32] = mm(z, h)
    q: f32[8, 32] = wait(s)
    j: f32[8, 32] = wait(i)
    l: f32[4, 32] = wait(n)
    return ([o], [q, j, l])
"""
EVENT = re.compile(r"_c10d_functional\.(\w+?)_?\.default\(|extern_kernels\.(mm)\(")
KINDS = {"all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter", "wait_tensor": "wait"}


@pytest.fixture
def groups() -> Iterator[dict[str, str]]:
    """The process group of each axis, on a fake world of four ranks."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "gpu"))
    yield {axis: mesh.get_group(axis).group_name for axis in ("node", "gpu")}
    dist.destroy_process_group()


def in_graph(graph: fx.Graph, groups: dict[str, str]) -> list[str]:
    """Hops and products in order; a start with its group."""
    named = [(n.target._opname, n) for n in graph.nodes if n.op == "call_function"]
    return [
        f"{name} {groups[ops.hop(node).axis]}" if ops.is_start(node) else name
        for name, node in named
        if ops.is_hop(node) or name == "mm"
    ]


def in_code(code: str) -> list[str]:
    """The same, from what Inductor generated."""
    found = []
    for line in code[code.index("def call(") :].splitlines():
        if (match := EVENT.search(line)) and "assert_" not in line:
            name = match[1] or match[2]
            group = re.search(r"'(\d+)'\)$", line.strip())
            found.append(KINDS.get(name, name) + (f" {group[1]}" if group else ""))
    return found


@pytest.mark.slow
def test_hops_and_products_keep_their_order(groups: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, compile_graph = [], _torch.compile_graph
    monkeypatch.setattr(_torch, "compile_graph", lambda module: compiled.append(compile_graph(module)) or compiled[-1])
    graph = parse(GRAPH)
    run = Lowering("inductor-whole", groups)(graph, "forward")
    assert in_code(compiled[0].source_code) == in_graph(graph, groups)
    (out,), saved = run(_inputs(graph))
    assert out.shape == (16, 32)
    assert [value.shape[0] for value in saved] == [8, 8, 4]


def _inputs(graph: fx.Graph) -> list[torch.Tensor]:
    return [torch.ones(tuple(node.meta["val"].shape)) for node in graph.find_nodes(op="placeholder")]
