"""Testing: say what the collectives of a graph must be, and run one graph for all ranks in one process; count what
passes through the process groups.

assert_collectives(program.backward).none("all_gather", axis="node")
assert_collectives(program.backward).count(1, "reduce", axis="gpu", per="blocks.*")
assert_collectives(program.forward).starts_before("gather", "blocks.1.*", end_of="blocks.0")

per_rank = run_ranks(graph, inputs, node=2, gpu=2)

with count_bytes(model) as sent:
    model(x).backward()
assert sent["node"] == 0
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from functools import cached_property, partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, fx, nn

from passes import ops
from passes.build import identifier
from passes.follow import TRANSPARENT
from passes.wire import dequantize
from shardc import _torch
from shardc.model import runtime_of


def assert_collectives(graph: fx.Graph | fx.GraphModule) -> Collectives:
    """The collectives of a graph, to be asserted on; each method returns the same object, so calls can be chained.

    Hops are chosen by what they do ("gather", "refresh", "reduce", "sync") or by kind ("all_gather",
    "reduce_scatter", "all_reduce", or "*"), by parameter (a pattern, `*` matches dots too) and by axis. A failure
    shows the collectives of the graph as a table, the chosen ones marked.
    """
    return Collectives(graph.graph if isinstance(graph, fx.GraphModule) else graph)


class Collectives:
    """See `assert_collectives`."""

    def __init__(self, graph: fx.Graph):
        self.graph = graph

    def none(self, what: str = "*", params: str = "*", *, axis: str = "*") -> Collectives:
        """There is no such hop.

        assert_collectives(graph).none("all_gather", axis="node")
        """
        found = self.select(what, params, axis)
        return self._expect(not found, f"no {_choice(what, params, axis)}", f"{len(found)}", found)

    def count(self, number: int, what: str = "*", params: str = "*", *, axis: str = "*", per: str = "") -> Collectives:
        """There are `number` such hops; with `per`, a pattern of modules (here `*` is one name), as many in each.

        assert_collectives(graph).count(2, "gather", "blocks.0.*")
        assert_collectives(graph).count(1, "reduce", axis="gpu", per="blocks.*")
        """
        found = self.select(what, params, axis)
        if not per:
            return self._expect(len(found) == number, f"{number} {_choice(what, params, axis)}", f"{len(found)}", found)
        modules = self._modules(per)
        self._expect(bool(modules), f"modules {per}", "none")
        for module in modules:
            inside = [start for start in found if any(_inside(param, module) for param in ops.hop(start).params)]
            says = f"{number} {_choice(what, params, axis)} in {module}"
            self._expect(len(inside) == number, says, f"{len(inside)}", inside)
        return self

    def starts_before(self, what: str, params: str = "*", *, end_of: str, axis: str = "*") -> Collectives:
        """Every such hop starts before the last compute of a module.

        assert_collectives(graph).starts_before("gather", "blocks.1.*", end_of="blocks.0")
        """
        last = self._compute(end_of)[-1]
        found = self._some(what, params, axis)
        late = [start for start in found if self._position[start] > self._position[last]]
        says = f"{_choice(what, params, axis)} to start before the end of {end_of} ({self._at(last)})"
        return self._expect(not late, says, f"{len(late)} later", late)

    def waits_after(self, what: str, params: str = "*", *, start_of: str, axis: str = "*") -> Collectives:
        """Every such hop is waited for after the first compute of a module.

        assert_collectives(graph).waits_after("reduce", "blocks.1.*", start_of="blocks.0")
        """
        first = self._compute(start_of)[0]
        found = self._some(what, params, axis)
        early = [start for start in found if self._position[_wait(start)] < self._position[first]]
        says = f"{_choice(what, params, axis)} to be waited for after the start of {start_of} ({self._at(first)})"
        return self._expect(not early, says, f"{len(early)} earlier", early)

    def select(self, what: str = "*", params: str = "*", axis: str = "*") -> list[fx.Node]:
        """Start nodes in order."""
        return [start for start in ops.hops(self.graph) if _matches(ops.hop(start), what, params, axis)]

    def table(self, marked: Sequence[fx.Node] = ()) -> str:
        """Every hop of the graph, a line each."""
        rows: list[tuple[str, ...]] = [("", "at", "start -> wait", "kind", "axis", "purpose", "params")]
        rows += [self._row(start, start in marked) for start in ops.hops(self.graph)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        return "\n".join(line.rstrip() for line in lines)

    def _row(self, start: fx.Node, marked: bool) -> tuple[str, ...]:
        hop, wait = ops.hop(start), _wait(start)
        at = f"{self._position[start]}-{self._position[wait]}"
        where = (">" if marked else "", at, f"{start.name} -> {wait.name}")
        return (*where, hop.kind, hop.axis, hop.purpose + (" again" if hop.again else ""), ", ".join(hop.params))

    def _expect(self, holds: bool, wanted: str, found: str, marked: Sequence[fx.Node] = ()) -> Collectives:
        if not holds:
            raise AssertionError(f"expected {wanted}; found {found}\n{self.table(marked)}")
        return self

    def _some(self, what: str, params: str, axis: str) -> list[fx.Node]:
        found = self.select(what, params, axis)
        self._expect(bool(found), f"some {_choice(what, params, axis)}", "none")
        return found

    def _at(self, node: fx.Node) -> str:
        return f"{node.name} at {self._position[node]}"

    @cached_property
    def _position(self) -> dict[fx.Node, int]:
        return {node: i for i, node in enumerate(self.graph.nodes)}

    def _compute(self, module: str) -> list[fx.Node]:
        """What a module computes, in order; never empty."""
        found = [node for node, paths in self._owners.items() if any(_inside(path, module) for path in paths)]
        self._expect(bool(found), f"compute of {module}", "none")
        return found

    @cached_property
    def _owners(self) -> dict[fx.Node, list[str]]:
        """Compute nodes with their modules: as traced, or else (a graph from text) the parameters that they use."""
        params = _params_in(self.graph)
        compute = [n for n in self.graph.nodes if n.op == "call_function" and n not in params and not ops.is_hop(n)]
        return {n: [path] if (path := module_of(n)) else _names_used(n, params) for n in compute}

    def _modules(self, pattern: str) -> list[str]:
        """Modules of all parameters that any hop names."""
        names = {name for start in ops.hops(self.graph) for name in ops.hop(start).params}
        depth = pattern.count(".") + 1
        modules = {".".join(name.split(".")[:depth]) for name in names if name.count(".") >= depth}
        return sorted(module for module in modules if fnmatchcase(module, pattern))


def module_of(node: fx.Node) -> str:
    """Path of the module that a node was traced in ("blocks.0.norm"); empty where nothing says."""
    if "module" in node.meta:
        return node.meta["module"]
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    path = str(list(stack.values())[-1][0]) if stack else ""
    return path.removeprefix("L['self']").removeprefix(".")


def _matches(hop: ops.Hop, what: str, params: str, axis: str) -> bool:
    names = what in ("*", hop.kind, hop.purpose) and any(fnmatchcase(name, params) for name in hop.params)
    return names and (axis in ("*", hop.axis) or axis in hop.axis.split("+"))


def _choice(what: str, params: str, axis: str) -> str:
    parts = ["collective" if what == "*" else what, axis != "*" and f"over {axis}", params != "*" and f"of {params}"]
    return " ".join(part for part in parts if part)


def _inside(name: str, module: str) -> bool:
    return name == module or name.startswith(module + ".")


def _wait(start: fx.Node) -> fx.Node:
    return next(user for user in start.users if ops.is_wait(user))


def _params_in(graph: fx.Graph) -> dict[fx.Node, tuple[str, ...]]:
    """Parameters: placeholders, waits of gathers and what only changes their form, with the names that they hold."""
    named = {identifier(name): (name,) for start in ops.hops(graph) for name in ops.hop(start).params}
    found: dict[fx.Node, tuple[str, ...]] = {}
    for node in graph.nodes:
        if node.op == "placeholder" and node.name in named:
            found[node] = named[node.name]
        elif ops.is_wait(node) and ops.hop(node).kind == "all_gather":
            found[node] = ops.hop(node).params
        elif node.target in (*TRANSPARENT, ops.compact, dequantize) and node.all_input_nodes[0] in found:
            found[node] = found[node.all_input_nodes[0]]
    return found


def _names_used(node: fx.Node, params: dict[fx.Node, tuple[str, ...]]) -> list[str]:
    return [name for n in node.all_input_nodes for name in params.get(n, ())]


def run_ranks(graph: fx.Graph | fx.GraphModule, inputs: Sequence[Sequence[Any]], **axes: int) -> list[Any]:
    """Run a graph with hops for all ranks in one process; `inputs[rank]` are the arguments of a rank.

    `axes` are the sizes of the mesh, outermost first, as in `Topology(node=2, gpu=2)`; ranks count along the innermost
    axis. A hop over 'gpu+node' has its pieces in the order of ranks. Returns what each rank's graph returns.
    """
    graph = graph.graph if isinstance(graph, fx.GraphModule) else graph
    mesh = Mesh(axes)
    if len(inputs) != mesh.world:
        raise ValueError(f"inputs of {len(inputs)} ranks for a mesh of {mesh.world}")
    values: dict[fx.Node, list[Any]] = {}
    arguments = iter(zip(*inputs, strict=True))
    last_uses = _last_uses(graph)
    for node in graph.nodes:
        values[node] = list(next(arguments)) if node.op == "placeholder" else _run(node, values, mesh)
        for used in last_uses.get(node, ()):
            del values[used]
    return values[graph.output_node()]


class Mesh:
    """Ranks by coordinate."""

    def __init__(self, axes: dict[str, int]):
        self.axes = axes
        self.coordinates = list(product(*map(range, axes.values())))

    @property
    def world(self) -> int:
        return len(self.coordinates)

    def groups(self, axis: str) -> Iterator[list[int]]:
        """Ranks that meet in a hop, for each place on the other axes."""
        inside = axis.split("+")
        if unknown := set(inside) - set(self.axes):
            raise ValueError(f"a hop is over {sorted(unknown)}, the mesh has {list(self.axes)}")
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank, coordinate in enumerate(self.coordinates):
            place = tuple(i for i, name in zip(coordinate, self.axes, strict=True) if name not in inside)
            groups.setdefault(place, []).append(rank)
        yield from groups.values()


def _run(node: fx.Node, values: dict[fx.Node, list[Any]], mesh: Mesh) -> list[Any]:
    if ops.is_start(node):
        return _collective(ops.hop(node), values[node.all_input_nodes[0]], mesh)
    if ops.is_wait(node):
        return values[node.all_input_nodes[0]]
    return [_run_on(rank, node, values) for rank in range(mesh.world)]


def _run_on(rank: int, node: fx.Node, values: dict[fx.Node, list[Any]]) -> Any:
    if node.op == "get_attr":
        return operator.attrgetter(str(node.target))(node.graph.owning_module)
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: values[n][rank])
    return args[0] if node.op == "output" else node.target(*args, **kwargs)


def _collective(hop: ops.Hop, pieces: list[Tensor], mesh: Mesh) -> list[Tensor]:
    result = list(pieces)
    for group in mesh.groups(hop.axis):
        if len(group) != hop.size:
            raise ValueError(f"the {hop} says {hop.size} ranks, the mesh has {len(group)}")
        for rank, value in zip(group, _MEET[hop.kind]([pieces[rank] for rank in group]), strict=True):
            result[rank] = value
    return result


def _gathered(pieces: list[Tensor]) -> list[Tensor]:
    return [torch.cat(pieces)] * len(pieces)


def _summed(pieces: list[Tensor]) -> list[Tensor]:
    return [torch.stack(pieces).sum(0)] * len(pieces)


def _scattered(pieces: list[Tensor]) -> list[Tensor]:
    return list(_summed(pieces)[0].chunk(len(pieces)))


def _exchanged(pieces: list[Tensor]) -> list[Tensor]:
    return [torch.cat(mine) for mine in zip(*(piece.chunk(len(pieces)) for piece in pieces), strict=True)]


_MEET = {"all_gather": _gathered, "all_reduce": _summed, "reduce_scatter": _scattered, "all_to_all": _exchanged}


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Values that nobody needs behind a node; an unused one is kept to the end."""
    seen: set[fx.Node] = set()
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(graph.nodes):
        found[node] = [used for used in node.all_input_nodes if used not in seen]
        seen.update(node.all_input_nodes)
    return found


@contextmanager
def count_bytes(model: nn.Module) -> Iterator[Sent]:
    """Count the bytes that this rank sends over each axis of a compiled model, at its process groups.

    with count_bytes(model) as sent:
        for x, y in micro_batches:
            model(x, y).backward()
            print(sent.taken())

    By the convention of `passes.ops.moved_bytes`: (n-1)/n of the full payload, twice that for an all-reduce, rounded
    down. What DTensors send inside the block (`clip_grad_norm_`, `full_tensor`) counts too; collectives of other kinds
    than all-gather, reduce-scatter, all-reduce and all-to-all fail there. Raises `shardc.Error` for a model that is not
    compiled.
    """
    groups = runtime_of(model).lowering.groups
    sent = Sent(dict.fromkeys(groups, 0))
    with ExitStack() as stack:
        for axis, name in groups.items():
            stack.enter_context(_torch.watched(name, partial(sent.add, axis)))
        yield sent


class Sent(dict[str, int]):
    """Bytes that this rank sent: axis -> bytes; `by_kind` has them by (axis, kind of the collective)."""

    def __init__(self, by_axis: Mapping[str, int], by_kind: Mapping[tuple[str, str], int] | None = None):
        super().__init__(by_axis)
        self.by_kind = Counter(by_kind or {})
        self._before: Sent | None = None

    def add(self, axis: str, kind: str, payload_bytes: int, size: int) -> None:
        """A collective over an axis of `size` ranks, by its full payload."""
        own = payload_bytes * (size - 1) * (2 if kind == "all_reduce" else 1) // size
        self[axis] += own
        self.by_kind[axis, kind] += own

    def taken(self) -> Sent:
        """What was counted since the last call; all of it the first time."""
        before, self._before = self._before, Sent(self, self.by_kind)
        if before is None:
            return Sent(self, self.by_kind)
        return Sent({axis: sent - before[axis] for axis, sent in self.items()}, self.by_kind - before.by_kind)
