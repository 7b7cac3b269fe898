"""Capture: the model's forward, as the user wrote it, becomes one joint graph (forward + backward).

`torch.compile` is the front door: Dynamo takes the full graph, guards on whatever it depends on (shapes, dtypes,
structure, train/eval, grad mode, autocast, requires_grad, hooks, plain attributes), calls again when a guard fails,
and puts the user's own output objects together again. While it traces, and whenever the model runs, each parameter is
stood in for by a *hollow* one: same shape, dtype and device, no storage. So nothing of full size is ever there.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from passes.build import identifier, placeholders, set_outputs
from passes.errors import Error
from shardc import _torch


def hollow(shape: Sequence[int], dtype: torch.dtype, device: torch.device, requires_grad: bool) -> nn.Parameter:
    """A parameter of this shape without storage."""
    value = torch.empty(shape, dtype=dtype, device=device)
    value.untyped_storage().resize_(0)
    return nn.Parameter(value, requires_grad=requires_grad)


def own_code(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A function like `forward`, with a code object of its own. Dynamo keeps its cache, and what it has given up on, by
    code object; models of one class do not share theirs. What is torch's, Dynamo would wrap in one function for all."""
    if not isinstance(forward, types.FunctionType) or forward.__module__.startswith("torch."):
        forward = _call(forward)
    code, name = forward.__code__.replace(), forward.__name__
    new = types.FunctionType(code, forward.__globals__, name, forward.__defaults__, forward.__closure__)
    new.__kwdefaults__ = forward.__kwdefaults__
    return new


def _call(forward: Callable[..., Any]) -> Any:
    def call(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(model, *args, **kwargs)

    return call


@dataclass(frozen=True)
class Captured:
    """A traced call. `graph` is the joint graph in normal form:

        def joint(param..., buffer..., input..., tangents_...): return ([outputs], {name: gradient})

    (forward only where there is nothing to differentiate: no tangents, no gradients).
    """

    graph: fx.Graph
    params: dict[str, str]
    """placeholder name -> parameter name"""
    inputs: list[str]
    """placeholder names in the order of the call's flat inputs"""
    mutated: list[int]
    """the first outputs are new values of these inputs (indices into `inputs`)"""
    differentiable: list[bool]
    """for each output of the user: does it have a tangent"""
    input_grads: dict[str, str]
    """key of a gradient that belongs to an input of the user -> placeholder name"""

    @property
    def trains(self) -> bool:
        return any(self.differentiable)


def capture(module: fx.GraphModule, inputs: Sequence[Any], names: Mapping[int, str]) -> Captured:
    """Dynamo's graph and its example inputs -> joint graph. `names` maps the id of a hollow parameter or of a buffer to
    'parameter or buffer name' and tells parameters (they have hollow storage) from the rest."""
    joint = _torch.export_joint(module, inputs)
    graph = joint.graph
    nodes = list(placeholders(graph).values())
    wanted = [
        _input_name(node, value, names)
        for node, value in zip(module.graph.find_nodes(op="placeholder"), inputs, strict=True)
    ]
    for node, name in zip(nodes, wanted, strict=False):
        _rename(node, name)
    _set_modules(graph)
    _check_products(graph)
    params = {n.name: names[id(v)] for n, v in zip(nodes, inputs, strict=False) if _is_hollow(v)}
    return _normal_form(graph, nodes[: len(inputs)], nodes[len(inputs) :], params)


def _normal_form(graph: fx.Graph, inputs: list[fx.Node], tangents: list[fx.Node], params: dict[str, str]) -> Captured:
    output = graph.output_node()
    flat, descriptors = list(output.args[0]), output.meta["desc"]
    grads: dict[str, fx.Node] = {}
    results, mutated, num_user = [], [], 0
    for node, descriptor in zip(flat, descriptors, strict=True):
        index = _torch.gradient_of(descriptor)
        if index is not None and node is not None:
            name = inputs[index].name
            grads[params.get(name, name)] = node
        elif index is None and descriptor is not None:
            results.append(node)
            changed = _torch.mutated_input(descriptor)
            if changed is not None:
                _check_not_changed(params.get(inputs[changed].name))
                mutated.append(changed)
    num_user = len(results) - len(mutated)
    with_tangent = {_torch.output_of(t.meta["desc"]) for t in tangents}
    graph.set_codegen(fx.graph.CodeGen())
    set_outputs(graph, (results, grads))
    output.meta.clear()
    return Captured(
        graph,
        params,
        [n.name for n in inputs],
        mutated,
        [i in with_tangent for i in range(num_user)],
        {name: name for name in grads if name not in params.values()},
    )


PRODUCTS = tuple(getattr(torch.ops.aten, name).default for name in ("mm", "addmm", "bmm", "baddbmm", "convolution"))


def _check_products(graph: fx.Graph) -> None:
    """While a model is traced, values of several dtypes are multiplied without a word; when it runs, they are not."""
    for node in graph.nodes:
        if node.target in PRODUCTS:
            values = (value.meta["val"] for value in node.all_input_nodes)
            dtypes = {str(it.dtype).removeprefix("torch."): None for it in values if isinstance(it, torch.Tensor)}
            if len(dtypes) > 1:
                raise Error(
                    f"The model multiplies {' by '.join(dtypes)} ({node.target})",
                    where=node.meta["module"] or "the model itself",
                    fix="inputs are not cast to the plan's param_dtype: pass them in it, or cast them in the forward",
                )


def _check_not_changed(parameter: str | None) -> None:
    if parameter is not None:
        raise Error(
            f"The forward changes the parameter {parameter!r} in place; sharded, it would change a copy.",
            fix="Change it between steps, under torch.no_grad(), or keep what the forward changes in a buffer.",
        )


def _is_hollow(value: Any) -> bool:
    return isinstance(value, nn.Parameter) and value.numel() > 0 and value.untyped_storage().nbytes() == 0


def _input_name(node: fx.Node, value: Any, names: Mapping[int, str]) -> str:
    name = names.get(id(value))
    if name is not None:
        return identifier(name)
    return node.name.removeprefix("l_").removesuffix("_") or node.name


def _rename(node: fx.Node, name: str) -> None:
    node._rename(name)
    node.target = node.name


def _set_modules(graph: fx.Graph) -> None:
    """The path of the module that each node was traced in, for the forward and its backward."""
    for node in graph.nodes:
        stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
        node.meta["module"] = _path(next(reversed(stack.values()))[0]) if stack else ""


def _path(source: str) -> str:
    """L['self'].blocks[0].attn -> blocks.0.attn; a forward that is wrapped may take the model as L['args'][0]."""
    path = re.sub(r"^L\['\w+'\](\[0\])?", "", source)
    return ".".join(part.strip("'\"") for part in path.replace("[", ".").replace("]", "").split(".") if part)
