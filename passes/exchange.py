"""Exchange: a reduce-scatter becomes an all-to-all whose pieces are summed where they arrive.

    def joint(x: bf16[2, 8], tangents_1: bf16[2, 4]):
        ''
        t: bf16[8, 2] = permute(x, [1, 0])
        g: bf16[8, 4] = mm(t, tangents_1)
        r: bf16[4, 4] = reduce_scatter(g, 'gpu', 2, purpose='reduce', params=['w'])
        s: bf16[4, 4] = wait(r)
        return {'w': s}

becomes

    def joint(x: bf16[2, 8], tangents_1: bf16[2, 4]):
        ''
        t: bf16[8, 2] = permute(x, [1, 0])
        g: bf16[8, 4] = mm(t, tangents_1)
        all_to_all: bf16[8, 4] = all_to_all(g, 'gpu', 2, purpose='reduce', params=['w'])
        wait: bf16[8, 4] = wait(all_to_all)
        convert_element_type: f32[8, 4] = prims.convert_element_type(wait, f32)
        fold: f32[4, 4] = fold(convert_element_type, 2)
        convert_element_type_1: bf16[4, 4] = prims.convert_element_type(fold, bf16)
        return {'w': convert_element_type_1}

Gloo's reduce-scatter sends as much as its all-reduce, twice what is needed; an all-to-all sends only what is. The sum
is an op that a compiler fuses with what follows, and is made in float32.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx

from passes import ops
from passes.build import Writer, fake_mode
from passes.insert import cast


def exchange(graph: fx.Graph, axes: Collection[str]) -> fx.Graph:
    """Hops over these axes (flat ones, over all of theirs); before buckets. Edits in place."""
    write = Writer(graph, fake_mode(graph))
    for start in graph.find_nodes(op="call_function", target=ops.reduce_scatter):
        if set(ops.hop(start).axis.split("+")) <= set(axes):
            _exchange(graph, start, write)
    return graph


def _exchange(graph: fx.Graph, start: fx.Node, write: Writer) -> None:
    wait, dtype = ops.wait_of(start), start.meta["val"].dtype
    assert wait
    write.module = start.meta.get("module", "")
    with graph.inserting_before(wait):
        there = write(ops.wait, write(ops.all_to_all, *start.args, **start.kwargs))
        summed = write(ops.fold, cast(write, there, torch.float32), ops.hop(start).size)
        result = cast(write, summed, dtype)
    wait.replace_all_uses_with(result)
    graph.erase_node(wait)
    graph.erase_node(start)
