"""Lanes: the hops of one process group, issued in the order of the graph, beside compute.

A hop is issued where the graph starts it, and is `Flying` until its wait. On Gloo it goes by messages where it can
(`shardc.messages`); elsewhere the group's plain methods are called: the functional all-gather of torch goes through
Gloo's coalesced one, which corrupts the heap now and then when several are in flight.

One that relays what another hop brings (`passes.relay`) cannot be issued before that has come, and compute must not
stand still for it: on a GPU a stream of the lane waits in its place, elsewhere a thread of the lane, behind which later
hops of the lane queue up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from passes import ops
from shardc import _torch, messages
from shardc.failures import failed
from shardc.messages import Messages

LISTENERS: list[Callable[[float], None]] = []
"""They are told for how many seconds a thread stood still until a hop was issued, which no process group sees."""


class Flying:
    """A hop under way."""

    def __init__(self, hop: ops.Hop, source: torch.Tensor | Flying, out: torch.Tensor, whole: torch.Tensor | None):
        self.hop, self.out = hop, out
        self.whole = whole
        """what the gather that relays it brings, of which it is a part"""
        self.source: torch.Tensor | Flying | None = source
        self.issued: threading.Event | None = None
        """where a thread of the lane issues it"""
        self.work: dist.Work | Messages | None = None
        self.error: Exception | None = None

    def issue(self, group: str) -> None:
        """On its group, when what it relays has come. What fails is raised by `wait`."""
        try:
            if isinstance(self.source, Flying):
                self.source = self.source.wait()
            self.source = self.source.contiguous()  # type: ignore[union-attr]
            self.work = self._named(lambda: issue(self.hop.kind, _torch.group_called(group), self.out, self.source))
        except Exception as error:
            self.error = error

    def wait(self) -> torch.Tensor:
        """What the hop brings. Raises `Error` with the hop where it failed."""
        self.come()
        self.source = None  # the group has read it
        return self.out

    def come(self) -> None:
        """Returns when it has; on a GPU, what follows on the current stream waits for it. Raises as `wait` does."""
        if self.issued and not self.issued.is_set():
            began_s = time.perf_counter()
            self.issued.wait()
            for tell in LISTENERS:
                tell(time.perf_counter() - began_s)
        if self.error:
            raise self.error
        self._named(self.work.wait)  # type: ignore[union-attr]

    def _named(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except RuntimeError as error:
            raise failed(self.hop, error) from error


def wait(flying: Flying) -> torch.Tensor:
    return flying.wait()


class Lane:
    """The hops of one process group, of all models (`lane_of`)."""

    def __init__(self, group: str):
        self.group = group
        self.queue: SimpleQueue[Flying] | None = None
        self.queued: threading.Event | None = None
        """that the last hop that was left to the thread was issued"""
        self.stream: torch.cuda.Stream | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Lane:
        return self

    def start(
        self,
        hop: ops.Hop,
        source: torch.Tensor | Flying,
        *,
        in_place: bool = False,
        into: tuple[Lane, ops.Hop] | None = None,
    ) -> Flying:
        """`in_place`: nobody else needs what an all-reduce takes, so that it may be summed where it is. `into`: nobody
        but this gather needs what the hop brings, so that it may arrive where it is gathered."""
        x = source.out if isinstance(source, Flying) else source
        whole = into[0].in_arena(into[1], _shape(hop, x.shape), x) if into else None
        if in_place:
            out = x
        elif into and whole is not None:
            out = into[0].own_part(whole)
        else:
            out = self._room(hop, source)
        flying = Flying(hop, source, out, whole)
        if x.is_cuda and isinstance(source, Flying):
            self._issue_on_stream(flying)
        elif isinstance(source, Flying) or (self.queued and not self.queued.is_set()):
            self._leave_to_thread(flying)
        else:
            flying.issue(self.group)
        return flying

    def _room(self, hop: ops.Hop, source: torch.Tensor | Flying) -> torch.Tensor:
        """For what a hop brings."""
        if isinstance(source, Flying):
            if source.whole is not None:
                return source.whole
            source = source.out
        found = self.in_arena(hop, source.shape, source) if hop.kind == "all_gather" else None
        return source.new_empty(_shape(hop, source.shape)) if found is None else found

    def in_arena(self, hop: ops.Hop, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor | None:
        """Room for a gather of such parts, which ranks have in common; None where they have nothing in common."""
        group = _torch.group_called(self.group)
        whole = _shape(hop, shape)
        return messages.in_arena(group, whole, like) if _go_by_messages("all_gather", group, like) else None

    def own_part(self, whole: torch.Tensor) -> torch.Tensor:
        """Of what a gather brings."""
        group = _torch.group_called(self.group)
        return whole.chunk(group.size())[group.rank()]

    def _issue_on_stream(self, flying: Flying) -> None:
        if self.stream is None:
            self.stream = torch.cuda.Stream(flying.out.device)
        self.stream.wait_stream(torch.cuda.current_stream())  # what used the room for the result before is over
        with torch.cuda.stream(self.stream):
            flying.issue(self.group)

    def _leave_to_thread(self, flying: Flying) -> None:
        if self.queue is None:
            self.queue = SimpleQueue()
            threading.Thread(target=_issue_all, args=(self.queue, self.group), daemon=True).start()
        self.queued = flying.issued = threading.Event()
        self.queue.put(flying)


_LANES: WeakKeyDictionary[Any, Lane] = WeakKeyDictionary()


def lane_of(group: str) -> Lane:
    """The one lane of a process group, by its name. Models that have the group in common have it as well: in what order
    their hops are issued is then the same on all ranks."""
    return _LANES.setdefault(_torch.group_called(group), Lane(group))


def _issue_all(queue: SimpleQueue[Flying], group: str) -> None:
    while True:
        flying = queue.get()
        flying.issue(group)
        flying.issued.set()  # type: ignore[union-attr]
        del flying


def _shape(hop: ops.Hop, sent: Sequence[int]) -> tuple[int, ...]:
    """Of what a hop brings for a value of a shape."""
    if hop.kind == "all_gather":
        return (sent[0] * hop.size, *sent[1:])
    if hop.kind == "reduce_scatter":
        return (sent[0] // hop.size, *sent[1:])
    return tuple(sent)


def _all_gather(group: Any, out: torch.Tensor, x: torch.Tensor) -> Any:
    return group._allgather_base(out, x)


def _reduce_scatter(group: Any, out: torch.Tensor, x: torch.Tensor) -> Any:
    return group._reduce_scatter_base(out, x, dist.ReduceScatterOptions())


def _all_to_all(group: Any, out: torch.Tensor, x: torch.Tensor) -> Any:
    return group.alltoall_base(out, x, [], [], dist.AllToAllOptions())


def _all_reduce(group: Any, out: torch.Tensor, x: torch.Tensor) -> Any:
    if out is not x:
        out.copy_(x)
    return group.allreduce([out], dist.AllreduceOptions())


_ISSUE = {
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "all_reduce": _all_reduce,
}
_BY_MESSAGES = {
    "all_gather": messages.all_gather,
    "reduce_scatter": messages.reduce_scatter,
    "all_to_all": messages.all_to_all,
}


def issue(kind: str, group: Any, out: torch.Tensor, x: torch.Tensor) -> Any:
    """A collective on a group, whose result is in `out` when what this returns was waited for."""
    return (_BY_MESSAGES if _go_by_messages(kind, group, x) else _ISSUE)[kind](group, out, x)


def _go_by_messages(kind: str, group: Any, x: torch.Tensor) -> bool:
    return kind in _BY_MESSAGES and not x.is_cuda and _torch.is_gloo(group)
