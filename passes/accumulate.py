"""Accumulate: a backward that adds its gradients to those of earlier micro-batches.

    def backward(x: f32[2, 8], tangents_1: f32[2, 4]):
        ''
        t: f32[8, 2] = permute(x, [1, 0])
        p: f32[8, 4] = mm(t, tangents_1)
        r: f32[4, 4] = reduce_scatter(p, 'gpu', 2, purpose='reduce', params=['w'])
        g: f32[4, 4] = wait(r)
        return {'w': g}

becomes, for `w` with grads on gpu and optim on gpu+node,

    def backward(x: f32[2, 8], tangents_1: f32[2, 4], accumulator_w: f32[4, 4]):
        ''
        t: f32[8, 2] = permute(x, [1, 0])
        p: f32[8, 4] = mm(t, tangents_1)
        r: f32[4, 4] = reduce_scatter(p, 'gpu', 2, purpose='reduce', params=['w'])
        g: f32[4, 4] = wait(r)
        add: f32[4, 4] = add.Tensor(accumulator_w, g)
        return {'w': add}

A parameter that has an accumulator but no gradient in this graph passes it on. Where gradients are values of their own,
the sum may be written over the accumulator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from passes.build import Writer, behind, fake_mode, outputs, set_outputs
from passes.insert import Param, cast
from passes.memory import lives

PREFIX = "accumulator_"


def accumulate(graph: fx.Graph, params: Mapping[str, Param]) -> fx.Graph:
    """`params` by placeholder name: those with an accumulator. Edits in place."""
    mode = fake_mode(graph)
    grads = dict(outputs(graph))
    last = [n for n in graph.nodes if n.op == "placeholder"][-1]
    like = next(n.meta["val"] for n in graph.nodes if isinstance(n.meta.get("val"), torch.Tensor))
    own = _of_their_own(graph, list(grads.values()))
    for name, param in params.items():
        with graph.inserting_before(last.next):
            last = graph.placeholder(PREFIX + name)
        with mode:
            shape = param.layout.rung_shape(param.layout.grads)
            last.meta["val"] = like.new_empty(shape, dtype=accumulator_dtype(param))
        last.meta["given_up"] = grads.get(param.layout.name) in own
        grads[param.layout.name] = _add(graph, last, grads.get(param.layout.name), mode)
    set_outputs(graph, grads)
    return graph


def _of_their_own(graph: fx.Graph, grads: Sequence[fx.Node]) -> set[fx.Node]:
    """Those that are computed here, and share their memory with no other."""
    made = (life.values for life in lives(graph) if life.node.op == "call_function")
    held = ([grad for grad in grads if grad in values] for values in made)
    return {found[0] for found in held if len(found) == 1}


def accumulator_dtype(param: Param) -> torch.dtype:
    """An accumulator that is `.grad` has the dtype of the master parameter."""
    return param.master_dtype if param.grad_is_accumulator else param.reduce_dtype


def _add(graph: fx.Graph, accumulator: fx.Node, grad: fx.Node | None, mode: FakeTensorMode) -> fx.Node:
    if grad is None:
        return accumulator
    write = Writer(graph, mode, grad.meta.get("module", ""))
    with graph.inserting_before(behind(grad)):
        grad = cast(write, grad, accumulator.meta["val"].dtype)
        return write(torch.ops.aten.add.Tensor, accumulator, grad)
