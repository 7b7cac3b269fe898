"""Draw: a graph as a picture. Regions of compute are boxes, hops are coloured by what they are for and framed by their
axis, layers are clusters; equal layers are drawn once.

The source is in Graphviz' language, written beside the picture; it is rendered by `dot`, or by the libraries that the
pygraphviz package has with it.
"""

from __future__ import annotations

import re
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import graphviz
import torch
from torch import fx

from passes import ops
from passes.errors import Error
from passes.regions import Region, block_of, regions
from shardc.timeline import PURPOSE_COLOURS, label, size

AXIS_COLOURS = ("#1f3b5c", "#a3321e", "#4d6b1f", "#6b3f8a")
"""Frames of hops, by axis in the order of appearance."""
_SHOWN_OPS = 4


@dataclass
class Part:
    """A box of the picture: a hop with its wait, or a call of a region with its results."""

    node: fx.Node
    block: str
    key: str
    """what it is, but for the layer that it belongs to"""
    takes: list[fx.Node] = field(default_factory=list)


def draw(graph: fx.Graph, path: Path, *, fold: bool = True) -> Path:
    """Writes `path` and its source, as `.dot`."""
    source = dot_source(graph, fold=fold)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".dot").write_text(source)
    path.write_bytes(render(source, path))
    return path


def render(source: str, path: Path) -> bytes:
    """Graphviz' source as SVG. `path` is where it was to go."""
    if shutil.which("dot"):
        return graphviz.Source(source).pipe(format="svg")
    try:
        import pygraphviz
    except ImportError as error:
        raise Error(
            f"There is nothing here to render {path.with_suffix('.dot')} with.",
            fix="Install Graphviz (its `dot`) or `pip install pygraphviz`; the source is written.",
        ) from error
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        drawn = pygraphviz.AGraph(source)
        drawn.layout("dot")
        return bytes(drawn.draw(format="svg"))


def dot_source(graph: fx.Graph, *, fold: bool = True) -> str:
    """A graph in Graphviz' language; hops are in it, and compute cut into regions if it is not yet."""
    outer = graph if any(isinstance(node.target, Region) for node in graph.nodes) else regions(graph)
    parts = _parts(outer)
    same = _equal_blocks(parts) if fold else {}
    return _Drawing(parts, same).source


def _parts(outer: fx.Graph) -> dict[fx.Node, Part]:
    """The part of every node that belongs to one."""
    found: dict[fx.Node, Part] = {}
    for node in outer.nodes:
        takes = list(dict.fromkeys(found[n].node for n in node.all_input_nodes if n in found))
        if ops.is_start(node):
            hop = ops.hop(node)
            key = f"{hop.purpose} {hop.kind} {hop.axis} {ops.moved_bytes(node)} {_shape(node)}"
            found[node] = Part(node, block_of(hop.params[0]) if _one_block(hop) else "", key, takes)
        elif isinstance(node.target, Region):
            found[node] = Part(node, block_of(node.meta.get("module", "")), node.target.name, takes)
        elif node.op == "call_function" and takes:
            found[node] = found[node.all_input_nodes[0]] if len(takes) == 1 else Part(node, "", str(node.target), takes)
    return found


def _one_block(hop: ops.Hop) -> bool:
    return len({block_of(name) for name in hop.params}) == 1


def _equal_blocks(parts: dict[fx.Node, Part]) -> dict[str, list[str]]:
    """Blocks whose parts are the same, by the first of them in the order of layers."""
    keys: dict[str, list[str]] = {}
    for node, part in parts.items():
        if part.block and node is part.node:
            keys.setdefault(part.block, []).append(part.key)
    equal: dict[tuple[str, ...], list[str]] = {}
    for block, of_block in keys.items():
        equal.setdefault((_generic(block), *sorted(of_block)), []).append(block)
    by_number = (sorted(blocks, key=_numbers) for blocks in equal.values())
    return {blocks[0]: blocks for blocks in by_number if len(blocks) > 1}


def _generic(block: str) -> str:
    return re.sub(r"\d+", "*", block)


def _numbers(block: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", block)]


class _Drawing:
    def __init__(self, parts: dict[fx.Node, Part], same: dict[str, list[str]]):
        self.parts = {part.node: part for part in parts.values()}
        self.same = same
        self.shown_as = {block: first for first, blocks in same.items() for block in blocks}
        self.names = self._named()
        self.axes: dict[str, str] = {}
        self.dot = graphviz.Digraph(
            graph_attr={"fontname": "sans-serif", "ranksep": "0.3", "nodesep": "0.2", "compound": "true"},
            node_attr={"fontname": "sans-serif", "fontsize": "10", "shape": "box", "style": "filled"},
            edge_attr={"fontname": "sans-serif", "fontsize": "9", "color": "#777777", "arrowsize": "0.6"},
        )
        self._boxes()
        self._edges()
        self._legend()

    @property
    def source(self) -> str:
        return self.dot.source

    def _named(self) -> dict[fx.Node, str]:
        """The box of each part. A part of a layer that is not drawn has that of its like in the one that is."""
        names: dict[fx.Node, str] = {}
        first: dict[tuple[str, str, int], str] = {}
        count: dict[tuple[str, str], int] = {}
        for node, part in self.parts.items():
            place = count[part.block, part.key] = count.get((part.block, part.key), -1) + 1
            block = self.shown_as.get(part.block, part.block)
            if block == part.block:
                first[block, part.key, place] = node.name
            names[node] = f"{block} {part.key} {place}"
        like = {f"{block} {key} {place}": name for (block, key, place), name in first.items()}
        return {node: like[name] for node, name in names.items()}

    def _boxes(self) -> None:
        blocks: dict[str, list[Part]] = {}
        for part in self.parts.values():
            if self.names[part.node] == part.node.name:
                blocks.setdefault(part.block, []).append(part)
        for block, parts in blocks.items():
            if not block:
                for part in parts:
                    self._box(self.dot, part)
                continue
            with self.dot.subgraph(name=f"cluster_{block}") as cluster:
                cluster.attr(label=self._title(block), style="rounded", color="#9aa7b5", bgcolor="#f5f7fa")
                for part in parts:
                    self._box(cluster, part)

    def _title(self, block: str) -> str:
        blocks = self.same.get(block, [block])
        return block if len(blocks) == 1 else f"{blocks[0]} ... {blocks[-1]}  ({len(blocks)} equal layers)"

    def _box(self, where: graphviz.Digraph, part: Part) -> None:
        node = part.node
        if ops.is_start(node):
            hop = ops.hop(node)
            frame = self.axes.setdefault(hop.axis, AXIS_COLOURS[len(self.axes) % len(AXIS_COLOURS)])
            sent = f"{_rung(node)}, {size(ops.moved_bytes(node))} sent"
            wire = f" in {hop.wire}" if hop.wire else ""
            lines = [f"{hop.purpose} over {hop.axis}{wire}", label(hop.params, hop.piece), sent]
            colours = {"fillcolor": PURPOSE_COLOURS[hop.purpose], "color": frame, "fontcolor": "white", "penwidth": "3"}
            where.node(node.name, "\n".join(lines), tooltip="\n".join(hop.params), style="rounded,filled", **colours)
        elif isinstance(node.target, Region):
            where.node(node.name, "\n".join(_ops_of(node.target)), tooltip=node.target.name, fillcolor="#dbe7f5")
        else:
            where.node(node.name, str(node.target), fillcolor="#eeeeee")

    def _edges(self) -> None:
        drawn: set[tuple[str, str]] = set()
        for node, part in self.parts.items():
            for source in part.takes:
                edge = self.names[source], self.names[node]
                if edge in drawn:
                    continue
                drawn.add(edge)
                inside = self.parts[source].block == part.block or part.block not in self.shown_as
                back = not inside and self.parts[source].block in self.shown_as and self._same_box(source, node)
                self.dot.edge(*edge, **({"constraint": "false", "label": "next layer"} if back else {}))

    def _same_box(self, source: fx.Node, node: fx.Node) -> bool:
        return self.shown_as[self.parts[source].block] == self.shown_as[self.parts[node].block]

    def _legend(self) -> None:
        frames = [f'<td border="2" color="{colour}">{axis}</td>' for axis, colour in self.axes.items()]
        used = {ops.hop(node).purpose for node in self.parts if ops.is_start(node)}
        fills = [f'<td bgcolor="{colour}">{p}</td>' for p, colour in PURPOSE_COLOURS.items() if p in used]
        if frames:
            table = f'<<table border="0" cellspacing="4"><tr>{"".join([*fills, *frames])}</tr></table>>'
            self.dot.node("legend", table, shape="plaintext", fillcolor="white")


def _rung(start: fx.Node) -> str:
    """What a hop makes of what: the rows that a rank has before and after."""
    before, after = start.args[0].meta["val"], start.meta["val"]
    return f"{_dtype(before)}{_dims(before)} to {_dims(after)}"


def _shape(node: fx.Node) -> str:
    return _dims(node.meta["val"])


def _dims(value: torch.Tensor) -> str:
    return f"[{', '.join(map(str, value.shape))}]"


def _dtype(value: torch.Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


def _ops_of(region: Region) -> Iterator[str]:
    """A region in short: its heaviest ops, and how many more there are."""
    nodes = [n for n in region.graph.graph.nodes if n.op == "call_function"]
    heavy = sorted(nodes, key=_elements, reverse=True)
    names = list(dict.fromkeys(_op_name(n) for n in heavy))
    yield f"{region.name}: {len(nodes)} ops"
    yield ", ".join(names[:_SHOWN_OPS]) + (" ..." if len(names) > _SHOWN_OPS else "")


def _elements(node: fx.Node) -> int:
    """Products of matrices and attention come first."""
    is_heavy = any(word in _op_name(node) for word in ("mm", "attention", "conv"))
    value = node.meta.get("val")
    numel = prod(int(d) for d in value.shape) if isinstance(value, torch.Tensor) else 0
    return numel + (1 << 62) * is_heavy


def _op_name(node: fx.Node) -> str:
    return str(getattr(node.target, "_opname", None) or getattr(node.target, "__name__", node.target))
