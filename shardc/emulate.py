"""Emulate: one process is one rank of a world of any size, and its collectives take as long as links would.

Compute is real, collectives move memory on this device as real ones do, and their ends come when the model of the links
says: behind what is on its axes already, as long as `shardc.times.collective_us`. Any code that talks to
`torch.distributed` runs on it, FSDP2 too: so that overlap is compared at 1024 ranks on one device.

The others are taken to do what this rank does and to hold what it holds. A gather brings its piece again and again, a
sum is as many times what it has: numbers stay finite, but no model trains on them.

A collective is a message to a thread of its group (on a GPU: work on a stream of its group), which moves the memory;
`wait` returns when that is done and when the clock says so. Compiled compute keeps Python from running other threads;
one that only hands a result on to the next collective is not late for that, as a stream would not be.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from passes.errors import Error
from shardc.lanes import LISTENERS
from shardc.times import collective_us
from shardc.topology import Topology

STRAIGHT_ON_S = 1e-3
"""between the end of a wait and the next collective of a thread"""
LET_PASS = """
template <typename T> T let_pass(T start, T seconds) {
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - begin < seconds * 1e9);
    return start;
}
"""


@dataclass(frozen=True)
class Collective:
    """One that was issued. Times are `time.perf_counter` in seconds; on a GPU they are those of issuing."""

    kind: str
    axis: str
    """or several, inner first: gpu+node"""
    sent_bytes: int
    """by one rank"""
    issued_s: float
    begin_s: float
    end_s: float


@dataclass(eq=False)
class World:
    """The emulated world, as seen from the one rank that there is."""

    topology: Topology
    device: torch.device
    collectives: list[Collective] = field(default_factory=list)
    """since the last `clear`"""
    exposed_s: float = 0.0
    """that the thread which opened the world stood still in waits, since the last `clear`; not counted on a GPU"""

    def __post_init__(self) -> None:
        self.lock = threading.Lock()
        self.free_s: dict[str, float] = {}
        self.known_s: dict[tuple[Any, ...], float] = {}
        self.last: dict[str, torch.cuda.Event] = {}
        self.store = _Store(self.topology.world)  # C++ keeps only its own half of it
        self.queues: list[SimpleQueue[_Work | None]] = []
        self.movers: list[threading.Thread] = []
        self.thread = threading.get_ident()
        self.awake = threading.local()

    def clear(self) -> None:
        self.collectives, self.exposed_s = [], 0.0

    def book(self, kind: str, axis: str, sent_bytes: int, size: int) -> Collective:
        """A place on the lanes of its axes."""
        takes_s = self._takes_s(kind, axis, sent_bytes, size)
        lanes = self.topology.lanes(axis)
        with self.lock:
            now_s = self._asked_s()
            begin_s = max(now_s, *(self.free_s.get(lane, 0.0) for lane in lanes))
            booked = Collective(kind, axis, sent_bytes, now_s, begin_s, begin_s + takes_s)
            self.free_s |= dict.fromkeys(lanes, booked.end_s)
            self.collectives.append(booked)
        return booked

    def _takes_s(self, *collective: Any) -> float:
        """As `collective_us`; remembered, for the thread that computes pays for it."""
        if collective not in self.known_s:
            self.known_s[collective] = collective_us(self.topology, *collective) / 1e6
        return self.known_s[collective]

    def stood(self, seconds: float) -> None:
        """A thread stood still in a wait."""
        if threading.get_ident() == self.thread:
            self.exposed_s += seconds

    def woke(self, due_s: float) -> None:
        """A wait is over that should have been at `due_s`: other threads may have kept Python from going on."""
        self.awake.at_s = time.perf_counter()
        self.awake.late_s = self.awake.at_s - due_s

    def _asked_s(self) -> float:
        """Now; or, of a thread that goes straight on from a wait that Python held up, as if it had not."""
        now_s = time.perf_counter()
        straight_on = threading.get_ident() != self.thread and now_s - getattr(self.awake, "at_s", 0.0) < STRAIGHT_ON_S
        return now_s - self.awake.late_s if straight_on else now_s


@contextmanager
def emulate(topology: Topology, device: str = "cpu") -> Iterator[World]:
    """While open, `torch.distributed` has a default process group of `topology.world` ranks, of which this is rank 0.

    topology: says how fast its axes are; groups must be over whole axes of it. device: "cpu" or "cuda".
    Raises `Error` where the topology does not say, and where there is a process group already.
    """
    topology.computes  # noqa: B018 (it raises where there are no links)
    if dist.is_initialized():
        raise Error("there is a process group already", fix="emulate in a process of its own")
    world = World(topology, torch.device(device))
    backend = f"emulated_{device}"
    dist.Backend.register_backend(backend, partial(_group, world), extended_api=True, devices=[device])
    dist.init_process_group(backend, store=world.store, rank=0, world_size=topology.world)
    LISTENERS.append(world.stood)
    try:
        yield world
    finally:
        LISTENERS.remove(world.stood)
        dist.destroy_process_group()
        for queue in world.queues:
            queue.put(None)
        for mover in world.movers:
            mover.join()  # one that ends with the interpreter aborts the process


def _axes(topology: Topology, ranks: list[int]) -> str:
    """What a group of these ranks is over, inner axis first."""
    places = [topology.coordinate(rank) for rank in ranks]
    varied = [i for i in range(len(topology.axes)) if len({place[i] for place in places}) > 1]
    axis = "+".join(topology.inner[i][0] for i in varied)
    if len(ranks) > 1 and topology.group_size(axis) != len(ranks):
        raise Error(
            f"a group of {len(ranks)} ranks is not over whole axes of {topology}",
            fix=f"emulate a topology in which these are an axis of their own: {ranks[:8]}",
        )
    return axis


class _Store(dist.Store):
    """Where every rank writes what this one writes."""

    def __init__(self, world: int):
        super().__init__()
        self.world = world
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes | str) -> None:
        self.values[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key: str) -> bytes:
        if key not in self.values:
            raise dist.DistStoreError(f"no rank has set {key!r}, and there is only one")
        return self.values[key]

    def add(self, key: str, amount: int) -> int:
        total = int(self.values.get(key, b"0")) + amount * self.world
        self.values[key] = str(total).encode()
        return total

    def wait(self, keys: list[str], timeout: Any = None) -> None:
        for key in keys:
            self.get(key)

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def clone(self) -> _Store:
        return self


class _Work(dist._Work):
    """A collective under way."""

    def __init__(self, world: World, booked: Collective | None, move: Callable[[], object]):
        super().__init__()
        self.world, self.booked, self.move = world, booked, move
        self.moving = threading.Lock()  # an Event takes six times as long to make
        self.moving.acquire()
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            with torch.no_grad():
                self.move()
        except Exception as error:
            self.error = error
        self.moving.release()

    def is_completed(self) -> bool:
        return not self.moving.locked() and time.perf_counter() >= self._end_s

    def is_success(self) -> bool:
        return self.is_completed() and self.error is None

    def wait(self, timeout: Any = None) -> bool:
        began_s = time.perf_counter()
        with self.moving:
            pass
        if self.error:
            raise self.error
        if (left_s := self._end_s - time.perf_counter()) > 0:
            time.sleep(left_s)
        self.world.stood(time.perf_counter() - began_s)
        self.world.woke(max(began_s, self._end_s))
        return True

    @property
    def _end_s(self) -> float:
        return self.booked.end_s if self.booked else 0.0


class _StreamWork(dist._Work):
    """A collective under way on a GPU: what follows on the current stream waits for it, no thread does."""

    def __init__(self, done: torch.cuda.Event, held: tuple[Any, ...]):
        super().__init__()
        self.done, self.held = done, held

    def is_completed(self) -> bool:
        return self.done.query()

    def is_success(self) -> bool:
        return self.is_completed()

    def wait(self, timeout: Any = None) -> bool:
        self.done.wait(torch.cuda.current_stream())
        self.held = ()
        return True


class _Group(dist.ProcessGroup):
    """One process group of the world, as c10d calls it."""

    def __init__(self, world: World, rank: int, size: int, name: str, axis: str):
        super().__init__(rank, size)
        self.world, self.name, self.axis = world, name, axis
        self.ranks = size
        if world.device.type == "cuda":
            self.stream, self.aside = torch.cuda.Stream(), torch.cuda.Stream()
        else:
            self.queue: SimpleQueue[_Work | None] = SimpleQueue()
            world.queues.append(self.queue)
            world.movers.append(threading.Thread(target=_run_all, args=(self.queue,), daemon=True))
            world.movers[-1].start()

    @property
    def group_name(self) -> str:
        return self.name

    def getBackendName(self) -> str:
        return "emulated"

    def go(self, kind: str, full_bytes: int, move: Callable[[], object], *held: Any) -> dist._Work:
        """A collective in which each rank has, or gets, `full_bytes` in all. Of one rank, it only moves memory."""
        booked = None
        if self.ranks > 1:
            rounds = 2 if kind == "all_reduce" else 1
            sent_bytes = rounds * full_bytes * (self.ranks - 1) // self.ranks
            booked = self.world.book(kind, self.axis, sent_bytes, self.ranks)
        if self.world.device.type == "cuda":
            return self._go_on_stream(booked, move, held)
        work = _Work(self.world, booked, move)
        self.queue.put(work)
        return work

    def _go_on_stream(
        self, booked: Collective | None, move: Callable[[], object], held: tuple[Any, ...]
    ) -> _StreamWork:
        """On the group's stream, memory moves while a kernel that only looks at the clock lets the time pass."""
        lanes = self.world.topology.lanes(self.axis) if booked else ()
        ready = torch.cuda.current_stream().record_event()
        self.aside.wait_event(ready)
        self.stream.wait_event(ready)
        for lane in lanes:
            if lane in self.world.last:
                self.stream.wait_event(self.world.last[lane])
        with torch.no_grad(), torch.cuda.stream(self.aside):
            move()
        with torch.cuda.stream(self.stream):
            if booked:
                let_pass(booked.end_s - booked.begin_s)
            self.stream.wait_stream(self.aside)
            done = self.stream.record_event()
        self.world.last |= dict.fromkeys(lanes, done)
        return _StreamWork(done, held)

    # One tensor each

    def _allgather_base(self, out: torch.Tensor, x: torch.Tensor, opts: Any = None) -> dist._Work:
        return self.go("all_gather", out.nbytes, lambda: _gather(out, x, self.ranks), out, x)

    def _reduce_scatter_base(self, out: torch.Tensor, x: torch.Tensor, opts: Any = None) -> dist._Work:
        factor = self._factor(opts)
        return self.go("reduce_scatter", x.nbytes, lambda: _scatter(out, x, self.rank(), factor), out, x)

    def alltoall_base(self, out: torch.Tensor, x: torch.Tensor, *args: Any) -> dist._Work:
        return self.go("all_to_all", x.nbytes, lambda: _copy(out, x), out, x)

    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base
    all_to_all_single = alltoall_base

    # Lists of tensors

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> dist._Work:
        factor = self._factor(opts)
        return self.go("all_reduce", _bytes(tensors), lambda: [t.mul_(factor) for t in tensors], tensors)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> dist._Work:
        return self.go("broadcast", _bytes(tensors), lambda: None, tensors)

    def allgather(self, outs: list[list[torch.Tensor]], xs: list[torch.Tensor], opts: Any = None) -> dist._Work:
        def move() -> None:
            for out, x in zip(outs, xs, strict=True):
                torch._foreach_copy_(out, [x] * len(out))

        return self.go("all_gather", sum(map(_bytes, outs)), move, outs, xs)

    def scatter(self, outs: list[torch.Tensor], xs: list[list[torch.Tensor]], opts: Any = None) -> dist._Work:
        own = [x[self.rank()] for x in xs] or outs
        return self.go("scatter", sum(map(_bytes, xs)), lambda: torch._foreach_copy_(outs, own), outs, xs)

    def allgather_into_tensor_coalesced(self, outs: Any, xs: Any, opts: Any = None) -> dist._Work:
        def move() -> None:
            for out, x in zip(outs, xs, strict=True):
                _gather(out, x, self.ranks)

        return self.go("all_gather", _bytes(outs), move, outs, xs)

    def reduce_scatter_tensor_coalesced(self, outs: Any, xs: Any, opts: Any = None) -> dist._Work:
        factor = self._factor(opts)

        def move() -> None:
            for out, x in zip(outs, xs, strict=True):
                _scatter(out, x, self.rank(), factor)

        return self.go("reduce_scatter", _bytes(xs), move, outs, xs)

    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def barrier(self, opts: Any = None) -> dist._Work:
        return self.go("all_reduce", 0, lambda: None)

    def _factor(self, opts: Any) -> int:
        """What equal values of all ranks make of one."""
        op = getattr(opts, "reduceOp", dist.ReduceOp.SUM)
        return self.ranks if op == dist.ReduceOp.SUM else 1


def _group(world: World, options: Any, _: Any) -> _Group:
    ranks = list(options.global_ranks_in_group) or list(range(world.topology.world))
    axis = _axes(world.topology, ranks)
    return _Group(world, options.group_rank, options.group_size, options.group_id, axis)


def _run_all(queue: SimpleQueue[_Work | None]) -> None:
    while work := queue.get():
        work.run()


def _gather(out: torch.Tensor, x: torch.Tensor, size: int) -> None:
    out.view(size, -1).copy_(x.reshape(1, -1).expand(size, -1))


def _scatter(out: torch.Tensor, x: torch.Tensor, rank: int, factor: int) -> None:
    """Reads all of `x`, as a real one does."""
    pieces = x.view(-1, out.numel())
    torch.sum(pieces, 0, out=out.view(-1))
    torch.mul(pieces[rank], factor, out=out.view(-1))


def _copy(out: torch.Tensor, x: torch.Tensor) -> None:
    out.copy_(x)


def _bytes(tensors: list[torch.Tensor]) -> int:
    return sum(t.nbytes for t in tensors)


def let_pass(seconds: float) -> None:
    """On the current stream, by the GPU's wall clock. (`torch.cuda._sleep` counts cycles, which are as long as the
    clock rate of the moment has them.)"""
    kernel, start = _passing()
    kernel(start, seconds=seconds)


@cache
def _passing() -> tuple[Callable[..., torch.Tensor], torch.Tensor]:
    start = torch.zeros((), dtype=torch.double, device="cuda")
    return torch.cuda.jiterator._create_jit_fn(LET_PASS, seconds=0.0), start
