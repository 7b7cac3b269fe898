"""Refresh: a forward that makes new compute copies from the optim shards first.

    def forward(w: bf16[4, 4], x: bf16[2, 8]):
        ''
        a: bf16[8, 4] = all_gather(w, 'gpu', 2, purpose='gather', params=['w'], again=True)
        f: bf16[8, 4] = wait(a)
        y: bf16[2, 4] = mm(x, f)
        return ([y], [x, w])

becomes, for `w` with params on gpu and optim on gpu+node,

    def forward(w: f32[2, 4], x: bf16[2, 8]):
        ''
        convert_element_type: bf16[2, 4] = prims.convert_element_type(w, bf16)
        all_gather: bf16[4, 4] = all_gather(convert_element_type, 'node', 2, purpose='refresh', params=['w'])
        wait: bf16[4, 4] = wait(all_gather)
        a: bf16[8, 4] = all_gather(wait, 'gpu', 2, purpose='gather', params=['w'], again=True)
        f: bf16[8, 4] = wait(a)
        y: bf16[2, 4] = mm(x, f)
        return ([y], [x, wait], {'w': wait})

The copies are returned to be kept until the next update; what the backward gets is the same list as ever.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from passes.build import Writer, fake_mode, outputs, placeholders, set_outputs
from passes.insert import Param, cast, climb, module_of


def refresh(graph: fx.Graph, params: Mapping[str, Param], stale: Collection[str]) -> fx.Graph:
    """`params` by placeholder name, `stale` the placeholders to refresh. Edits in place."""
    mode = fake_mode(graph)
    nodes = placeholders(graph)
    used = [name for name in nodes if name in stale and nodes[name].users]
    copies = {params[name].layout.name: _refresh(graph, nodes[name], params[name], mode) for name in used}
    set_outputs(graph, (*outputs(graph), copies))
    return graph


def _refresh(graph: fx.Graph, node: fx.Node, param: Param, mode: FakeTensorMode) -> fx.Node:
    layout = param.layout
    users = list(node.users)
    with mode:
        node.meta["val"] = node.meta["val"].new_empty(layout.rung_shape(layout.optim), dtype=param.master_dtype)
    write = Writer(graph, mode, module_of(layout.name))
    with graph.inserting_before(min(users)):
        x = cast(write, node, param.rest_dtype)
        x = climb(write, x, param, layout.optim, layout.params, purpose="refresh")
    for user in users:
        user.replace_input_with(node, x)
    return x
