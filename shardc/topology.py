"""The mesh by name: its axes, how ranks lie on them, and the rungs that can be spelled on it.

Axes are written outermost first, `Topology(node=2, gpu=4)`, and ranks are row-major: rank 5 is node 1, gpu 1.
A rung is a number of inner axes (`passes.layout`); here it gets its names, "gpu" or "gpu+node".
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from itertools import accumulate, combinations, pairwise
from math import prod
from operator import mul
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.distributed.device_mesh import DeviceMesh

from passes.errors import Error
from shardc.links import Device, Link
from shardc.links import machine as machine_called

RungSpec = str | int | Sequence[str]
"""A rung as a user writes it: "replicated", "gpu", "gpu+node", "all", a tuple of names, or a number of inner axes."""

RESERVED = ("all", "replicated", "full")
"""Names that mean a rung or a value, so no axis may have them."""


@dataclass(frozen=True, init=False, repr=False)
class Topology:
    """A mesh of named axes, outermost first: `Topology(node=48, gpu=4, gcd=2)` is Frontier.

    `axes` and `sizes` are the names and the number of ranks along each, outermost first. Raises `Error` for no
    axis, a name that is no identifier or has another meaning, and a size that is no integer of at least 1.
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    links: tuple[tuple[str, Link], ...] = ()
    """how fast each axis is, outermost first; empty where nobody has said"""
    device: Device | None = None
    flat: tuple[tuple[str, Link], ...] = ()
    """how fast flat collectives over neighbouring axes ("gpu+node") are, where that was measured"""

    def __init__(self, /, **sizes: int):
        if not sizes:
            raise Error("a topology needs at least one axis", fix="Topology(node=2, gpu=8), outermost axis first")
        for name, size in sizes.items():
            _check_axis(name, size)
        object.__setattr__(self, "axes", tuple(sizes))
        object.__setattr__(self, "sizes", tuple(sizes.values()))
        object.__setattr__(self, "links", ())
        object.__setattr__(self, "device", None)
        object.__setattr__(self, "flat", ())

    @classmethod
    def preset(cls, name: str, *, nodes: int) -> Topology:
        """`nodes` hosts of a known kind ("dgx-h100"), with their links and device; sources are in `shardc.links`."""
        machine = machine_called(name)
        shape = cls(node=nodes, **dict(machine.inner))
        return shape.with_links(machine.device, **dict(machine.links))

    def with_links(self, device: Device, /, **links: Link) -> Topology:
        """The same mesh, of such devices and with axes this fast. Raises `Error` unless every axis has one link."""
        for name in links:
            self._check_known(name)
        missing = [name for name in self.axes if name not in links]
        if missing:
            raise Error(f"axis {missing[0]!r} of {self} has no link", fix=f"{missing[0]}=Link(gb_per_s, latency_us)")
        new = _topology(list(zip(self.axes, self.sizes, strict=True)))
        object.__setattr__(new, "links", tuple((name, links[name]) for name in self.axes))
        object.__setattr__(new, "device", device)
        return new

    def with_flat(self, links: Mapping[str, Link]) -> Topology:
        """The same, with flat collectives over neighbouring axes ("gpu+node") this fast; of others it is worked out
        from the links of their axes. Raises `Error` for what are no neighbours."""
        known = self.neighbours()
        for axes in links:
            if axes not in known:
                raise Error(f"{axes!r} are no neighbouring axes of {self}", fix=f"inner first: {', '.join(known)}")
        new = self.with_links(self.computes, **dict(self.links))
        object.__setattr__(new, "flat", tuple((axes, links[axes]) for axes in known if axes in links))
        return new

    def link(self, axis: str) -> Link:
        """Raises `Error` where nobody has said how fast the axis is."""
        self._check_known(axis)
        self._check_links()
        return dict(self.links)[axis]

    def is_near(self, axis: str) -> bool:
        """Whether it is known that ranks along an axis, or several ("gpu+node"), share memory."""
        flat = dict(self.flat).get(axis)
        known = {name for name, link in self.links if link.near}
        return flat.near if flat else known.issuperset(axis.split("+"))

    def lanes(self, axis: str) -> tuple[str, ...]:
        """What a collective over an axis, or a flat one over several ("gpu+node"), holds while it runs: each axis, but
        for the parts of one that was split, which share its link."""
        links = dict(self.links)
        return tuple(dict.fromkeys(links[a].lane or a if a in links else a for a in axis.split("+")))

    @property
    def computes(self) -> Device:
        """The device. Raises `Error` where nobody has said what it is."""
        self._check_links()
        assert self.device
        return self.device

    @property
    def library(self) -> str:
        """What moves bytes, where that is known to matter."""
        return self.device.library if self.device else ""

    def _check_links(self) -> None:
        if not self.links:
            raise Error(
                f"{self} does not say what its devices are and how fast its axes",
                fix='Topology.preset("dgx-h100", nodes=2), or .with_links(Device(...), node=Link(...), gpu=Link(...))',
            )

    @property
    def world(self) -> int:
        """Number of ranks."""
        return prod(self.sizes)

    @property
    def inner(self) -> tuple[tuple[str, int], ...]:
        """(name, size) of each axis, INNER axis first: what `passes.layout.Layout.axes` wants."""
        return tuple(zip(self.axes, self.sizes, strict=True))[::-1]

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Index of `rank` on each axis, inner axis first."""
        if not 0 <= rank < self.world:
            raise Error(f"rank {rank} is not one of the {self.world} ranks of {self}")
        indices = []
        for _, size in self.inner:
            rank, index = divmod(rank, size)
            indices.append(index)
        return tuple(indices)

    def rung(self, spec: RungSpec) -> int:
        """Number of inner axes that `spec` names.

        Raises `Error` for an axis that is not in the topology and for axes that leave out a faster one.
        """
        if isinstance(spec, int):
            return self._counted(spec)
        if isinstance(spec, str) and spec in ("replicated", "all"):
            return 0 if spec == "replicated" else len(self.axes)
        return self._named(_names(spec), spec)

    def _counted(self, rung: int) -> int:
        if isinstance(rung, bool) or not 0 <= rung <= len(self.axes):
            raise Error(f"{rung!r} is not a rung of {self}", fix=f"a number of inner axes, 0 to {len(self.axes)}")
        return rung

    def _named(self, names: list[str], spec: object) -> int:
        inner = self.axes[::-1]
        for name in names:
            self._check_known(name)
        if len(set(names)) != len(names):
            raise Error(f"{spec!r} names an axis twice")
        if set(names) != set(inner[: len(names)]):
            reach = 1 + max(inner.index(name) for name in names)
            raise Error(
                f"a rung starts at the innermost axis and leaves none out, but {'+'.join(names)!r} lacks "
                + ", ".join(repr(name) for name in inner[:reach] if name not in names),
                fix=f"did you mean {'+'.join(inner[:reach])!r}?",
            )
        return len(names)

    def _check_known(self, name: str) -> None:
        if name not in self.axes:
            close = get_close_matches(name, [*self.axes, "replicated", "all"], n=1)
            raise Error(
                f"unknown axis {name!r}; the axes, innermost first, are " + ", ".join(map(repr, self.axes[::-1])),
                fix=f"did you mean {close[0]!r}?" if close else f"one of {', '.join(map(repr, self._rung_names()))}",
            )

    def rung_name(self, rung: int) -> str:
        """The name of a rung: "replicated", "gpu", "gpu+node", and "all" for every axis."""
        rung = self._counted(rung)
        if rung == len(self.axes):
            return "all"
        return "+".join(self.axes[::-1][:rung]) or "replicated"

    def _rung_names(self) -> list[str]:
        return [self.rung_name(rung) for rung in range(len(self.axes) + 1)]

    def shared_by(self, rung: RungSpec) -> int:
        """Number of ranks that share one copy on a rung (AMSP's factor s): 1 where replicated, `world` on "all"."""
        return prod(size for _, size in self.inner[: self.rung(rung)])

    def split(self, factors: Collection[int]) -> Topology:
        """The same ranks and links, with axes cut so that every factor (of ranks that share one copy) is that of a
        rung: `Topology(node=2, gpu=8).split([4])` has axes node=2, gpu1=2, gpu0=4. Raises `Error` for a factor that is
        no divisor of an axis beyond the inner ones, and for two that cut one axis and do not divide each other."""
        known = self.factors()
        for factor in factors:
            if isinstance(factor, bool) or factor not in known:
                raise Error(
                    f"a factor of {factor!r} cannot be reached on {self}: it fills inner axes first, then a divisor of "
                    "the next",
                    fix=f"one of {', '.join(map(str, known))}",
                )
        parts: list[tuple[str, int]] = []
        names: dict[str, str] = {}
        links: dict[str, Link] = {}
        base = 1
        for axis, size in self.inner:
            cuts = sorted({factor for factor in factors if base < factor < base * size})
            found = _parts(axis, [base, *cuts, base * size])
            parts += found
            names[axis] = "+".join(name for name, _ in found)
            if self.links:
                own = self.link(axis)
                links |= {name: replace(own, lane=own.lane or axis) if cuts else own for name, _ in found}
            base *= size
        new = _topology(parts[::-1])
        if not links:
            return new
        flat = {"+".join(names[axis] for axis in axes.split("+")): link for axes, link in self.flat}
        return new.with_links(self.computes, **links).with_flat(flat)

    def factors(self) -> list[int]:
        """Of ranks that a rung can have where axes are split, ascending."""
        found, base = {1}, 1
        for _, size in self.inner:
            found |= {base * part for part in range(1, size + 1) if size % part == 0}
            base *= size
        return sorted(found)

    def neighbours(self) -> list[str]:
        """Every flat group: neighbouring axes of more than one rank, inner first ("gpu+node")."""
        names = [name for name, size in self.inner if size > 1]
        pairs = combinations(range(len(names) + 1), 2)
        return ["+".join(names[start:end]) for start, end in pairs if end - start > 1]

    def outside(self, rung: int) -> str:
        """The axes of more than one rank that a rung lacks, inner first ("gpu+node")."""
        return "+".join(name for name, size in self.inner[rung:] if size > 1)

    def group_size(self, axes: str | Sequence[str]) -> int:
        """Number of ranks in a process group over one axis ("node") or several ("gpu+node"), any set of axes."""
        names = set(_names(axes))
        for name in names:
            self._check_known(name)
        return prod(size for name, size in self.inner if name in names)

    def __repr__(self) -> str:
        return f"Topology({', '.join(f'{name}={size}' for name, size in self.inner[::-1])})"

    def to_dict(self) -> dict[str, Any]:
        """As lists, not as an object by name: the order of the axes matters, and JSON objects have none."""
        saved: dict[str, Any] = {"axes": list(self.axes), "sizes": list(self.sizes)}
        if self.links:
            saved["links"] = [link.to_dict() for _, link in self.links]
            saved["device"] = self.computes.to_dict()
        if self.flat:
            saved["flat"] = {axes: link.to_dict() for axes, link in self.flat}
        return saved

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Topology:
        """The inverse of `to_dict`. Raises `Error` for anything else."""
        if not isinstance(saved, Mapping) or set(saved) - {"links", "device", "flat"} != {"axes", "sizes"}:
            raise Error(f"a topology is saved as {{'axes': [...], 'sizes': [...]}}, not as {saved!r}")
        axes, sizes = saved["axes"], saved["sizes"]
        if not isinstance(axes, list) or not isinstance(sizes, list) or len(axes) != len(sizes):
            raise Error(f"a topology's axes and sizes are lists of one length, not {axes!r} and {sizes!r}")
        shape = _topology(list(zip(axes, sizes, strict=True)))
        return _with_saved_links(shape, saved) if len(saved) > 2 else shape

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the topology to a JSON file."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Topology:
        """Read a topology that `save` or `shardc.calibrate` wrote. Raises `Error` with the path and what is wrong where
        it is none."""
        name, remedy = os.fspath(path), "Topology.save writes such a file, and so does `python -m shardc calibrate`."
        try:
            return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
        except OSError as error:
            raise Error(f"{name} cannot be read: {error.strerror}", fix=f"Check the path. {remedy}") from error
        except ValueError as error:
            raise Error(f"{name} is no topology: it is no JSON ({error})", fix=remedy) from error
        except Error as error:
            raise Error(f"{name} is no topology: {error.what}", where=error.where, fix=error.fix or remedy) from error

    @classmethod
    def from_torchrun(cls, environ: Mapping[str, str] | None = None) -> Topology:
        """Axes `node` and `gpu` as the launcher reports them: torchrun, or where it is silent plain `srun`.

        Raises `Error` where neither launched this process and where nodes have unequal numbers of ranks.
        """
        env = os.environ if environ is None else environ
        counts = _torchrun_counts(env) or _slurm_counts(env)
        if not counts:
            raise Error(
                "neither torchrun nor srun launched this process: WORLD_SIZE with LOCAL_WORLD_SIZE is not set, "
                "nor SLURM_NTASKS with SLURM_STEP_TASKS_PER_NODE or SLURM_NTASKS_PER_NODE",
                fix="launch with torchrun or srun, or write Topology(node=2, gpu=8)",
            )
        if len(set(counts)) > 1:
            raise Error(
                f"nodes have unequal numbers of ranks: {', '.join(map(str, counts))}",
                fix=f"start the same number of ranks on every node, or write Topology(rank={sum(counts)})",
            )
        return cls(node=len(counts), gpu=counts[0])

    @classmethod
    def from_mesh(cls, mesh: DeviceMesh) -> Topology:
        """The topology of an n-D `DeviceMesh` with dim names, outermost dim first.

        Raises `Error` where dims have no names, or where ranks are not 0 to W-1 in row-major order: a topology says
        where a rank lies by its number alone.
        """
        if mesh.mesh_dim_names is None:
            raise Error("the mesh has no dim names", fix="init_device_mesh(..., mesh_dim_names=('node', 'gpu'))")
        ranks = mesh.mesh.flatten().tolist()
        if ranks != list(range(len(ranks))):
            raise Error(
                f"the mesh lists its ranks as {_short(ranks)}, not as 0 to {len(ranks) - 1} in row-major order: "
                "a topology finds a rank's place from its number, outermost axis most significant",
                fix="pass the whole mesh, outermost dim first, as init_device_mesh builds it",
            )
        return _topology(list(zip(mesh.mesh_dim_names, mesh.mesh.shape, strict=True)))

    def check_world(self, world_size: int, local_world_size: int | None = None) -> None:
        """Raise `Error` where the job that runs is not this topology.

        A host must hold whole inner axes, one rank (1) up to all; otherwise a fast axis would straddle hosts.
        """
        if world_size != self.world:
            raise Error(
                f"{self} has {self.world} ranks, the job has {world_size}",
                fix=f"launch {self.world} ranks, or change the sizes of the axes",
            )
        whole = [1, *accumulate((size for _, size in self.inner), mul)]
        if local_world_size is not None and local_world_size not in whole:
            raise Error(
                f"a host runs {local_world_size} ranks (LOCAL_WORLD_SIZE), but the inner axes of {self} hold "
                f"{_either(sorted(set(whole)))}: an axis would straddle hosts",
                fix=f"make the inner axes multiply to {local_world_size}",
            )

    def mesh(self, device_type: str) -> DeviceMesh:
        """The one full mesh, dims listed INNER axis first, so that `Shard(0)` splits inner axes first.

        It is made once in a job, by all ranks together: models have its process groups in common.

        Raises `Error` without a process group, and where the running job is not this topology.
        """
        if not torch.distributed.is_initialized():
            raise Error(
                "the process group is not initialised",
                fix=f"torch.distributed.init_process_group(...) before, under torchrun with {self.world} ranks",
            )
        local = os.environ.get("LOCAL_WORLD_SIZE")
        self.check_world(
            torch.distributed.get_world_size(), None if local is None else _count("LOCAL_WORLD_SIZE", local)
        )
        ranks = torch.arange(self.world).view(self.sizes)
        inner_first = ranks.permute(*reversed(range(len(self.sizes)))).flatten().view(self.sizes[::-1])
        make = partial(DeviceMesh, device_type, inner_first, mesh_dim_names=self.axes[::-1])
        return _once((device_type, self.inner), make)

    def flat_group(self, axes: str) -> torch.distributed.ProcessGroup:
        """The process group of this rank over several axes ("gpu+node"), made once for a job. All ranks call it, in the
        same order."""
        names = axes.split("+")
        others = [i for i, (name, _) in enumerate(self.inner) if name not in names]
        places: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world):
            coordinate = self.coordinate(rank)
            places.setdefault(tuple(coordinate[i] for i in others), []).append(rank)
        make = partial(torch.distributed.new_subgroups_by_enumeration, list(places.values()))
        return _once((axes, self.inner), make)[0]


_MADE: WeakKeyDictionary[Any, dict[Hashable, Any]] = WeakKeyDictionary()
"""Of each default process group."""


def _once(key: Hashable, make: Callable[[], Any]) -> Any:
    """What is made of process groups. A thread of each group on Gloo wakes up a hundred times a second even if nothing
    goes on: steps of four ranks on two cores took a tenth longer beside four models with groups of their own."""
    made = _MADE.setdefault(torch.distributed.group.WORLD, {})
    if key not in made:
        made[key] = make()
    return made[key]


def _parts(axis: str, sizes: list[int]) -> list[tuple[str, int]]:
    """One axis cut at cumulative sizes, inner part first: [1, 4, 8] makes gpu0=4, gpu1=2."""
    for small, large in pairwise(sizes):
        if large % small:
            raise Error(
                f"factors {small} and {large} do not nest: both cut axis {axis!r}",
                fix="choose factors each of which divides the next",
            )
    ratios = [large // small for small, large in pairwise(sizes)]
    return [(axis if len(ratios) == 1 else f"{axis}{i}", ratio) for i, ratio in enumerate(ratios)]


def _topology(pairs: list[tuple[Any, Any]]) -> Topology:
    """From (name, size) pairs, outermost first; a dict would swallow a name given twice."""
    names = [name for name, _ in pairs]
    if not all(isinstance(name, str) for name in names):
        raise Error(f"the names of axes are strings, not {names!r}")
    if len(set(names)) != len(names):
        raise Error(f"an axis is named twice: {', '.join(names)}")
    return Topology(**dict(pairs))


def _with_saved_links(shape: Topology, saved: Mapping[str, Any]) -> Topology:
    try:
        links = {axis: Link.from_dict(link) for axis, link in zip(shape.axes, saved["links"], strict=True)}
        device = Device.from_dict(saved["device"])
        flat = {axes: Link.from_dict(link) for axes, link in saved.get("flat", {}).items()}
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise Error(f"the links and the device of a saved topology do not read: {error!r}") from error
    return shape.with_links(device, **links).with_flat(flat)


def _check_axis(name: str, size: object) -> None:
    if not name.isidentifier() or name in RESERVED:
        raise Error(
            f"{name!r} cannot name an axis",
            fix=f"an identifier other than {', '.join(map(repr, RESERVED))}, such as 'node' or 'gpu'",
        )
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise Error(f"axis {name!r} has size {size!r}", fix="an integer of at least 1")


def _names(spec: object) -> list[str]:
    """Axis names of "gpu+node" or of a sequence of names."""
    names = spec.split("+") if isinstance(spec, str) else spec
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise Error(f"{spec!r} is not a rung", fix='"replicated", axis names such as "gpu+node", or "all"')
    return [name.strip() for name in names]


def _torchrun_counts(env: Mapping[str, str]) -> list[int]:
    """Ranks on each node; empty where torchrun did not launch this process."""
    if not {"WORLD_SIZE", "LOCAL_WORLD_SIZE"} <= set(env):
        return []
    world, local = (_count(name, env[name]) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    # A node with fewer ranks than the others can divide the world and still be wrong; the number of nodes tells.
    nodes = _count("GROUP_WORLD_SIZE", env["GROUP_WORLD_SIZE"]) if "GROUP_WORLD_SIZE" in env else world // local
    if world != nodes * local:
        raise Error(
            f"nodes have unequal numbers of ranks: WORLD_SIZE is {world}, LOCAL_WORLD_SIZE {local}",
            fix=f"start the same number of ranks on every node, or write Topology(rank={world})",
        )
    return [local] * nodes


def _slurm_counts(env: Mapping[str, str]) -> list[int]:
    """Ranks on each node of the job step; empty where srun did not launch this process."""
    if "SLURM_NTASKS" not in env:
        return []
    tasks = _count("SLURM_NTASKS", env["SLURM_NTASKS"])
    counts = _slurm_list(env, tasks)
    nodes = env.get("SLURM_STEP_NUM_NODES", env.get("SLURM_NNODES"))
    if counts and (sum(counts) != tasks or (nodes is not None and len(counts) != _count("the number of nodes", nodes))):
        raise Error(
            f"nodes have unequal numbers of ranks, or Slurm's variables disagree: {tasks} tasks, "
            f"{_short(counts)} a node" + (f", {nodes} nodes" if nodes else ""),
            fix="srun --ntasks-per-node=N with the same N on every node, or write Topology(node=2, gpu=8)",
        )
    return counts


def _slurm_list(env: Mapping[str, str], tasks: int) -> list[int]:
    """The step's own list first: SLURM_NTASKS_PER_NODE is what was asked for, and a step may differ from its job."""
    if "SLURM_STEP_TASKS_PER_NODE" in env:
        return _expand(env["SLURM_STEP_TASKS_PER_NODE"])
    if "SLURM_NTASKS_PER_NODE" in env:
        local = _count("SLURM_NTASKS_PER_NODE", env["SLURM_NTASKS_PER_NODE"])
        full, rest = divmod(tasks, local)
        return [local] * full + [rest] * (rest > 0)
    return []


def _expand(text: str) -> list[int]:
    """Slurm's run lengths, "4(x2),3", as [4, 4, 3]."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([1-9]\d*)(?:\(x([1-9]\d*)\))?\s*", part)
        if not match:
            raise Error(f"SLURM_STEP_TASKS_PER_NODE is {text!r}", fix="a list such as '4(x2)'")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _count(name: str, text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise Error(f"{name} is {text!r}", fix="an integer of at least 1")
    return int(text)


def _short(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")


def _either(numbers: list[int]) -> str:
    *most, last = map(str, numbers)
    return f"{', '.join(most)} or {last}" if most else last
