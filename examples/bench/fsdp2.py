"""FSDP2 as a baseline, with its best prefetch settings; on a CPU with the overlap of reduces that a GPU would have."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, Literal

import torch
import torch.distributed as dist
from llama import Llama
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

Start = Callable[[torch.Tensor, torch.Tensor, dist.ProcessGroup, Any], tuple[dist.Work, Callable[[], Any]]]
"""Starts a reduce-scatter: what to wait for, and what is left to do then."""
How = Literal["own", "exchanged", "background", "exchanged in background"]


def sharded_by_fsdp2(
    model: Llama,
    device: str,
    sizes: Sequence[int],
    *,
    replicated: bool,
    compiled: bool,
    prefetch: int,
    held: bool = False,
    dtype: torch.dtype | None = None,
    reduces: How = "background",
) -> tuple[Llama, Callable[[], None]]:
    """The model, and what waits for all reduces. `sizes` are nodes and GPUs a node; `replicated`: over the nodes.

    held: parameters stay full between a forward and its backward. dtype: that of compute and of all that travels.
    reduces: on a CPU, where FSDP2 stands still in each of its "own": an all-to-all and a local sum ("exchanged"), and
    while compute goes on ("background"), for which gradients must not change their dtype. A GPU has its own.
    """
    mesh = init_device_mesh(device, tuple(sizes), mesh_dim_names=("node", "gpu"))
    custom = _custom(reduces if device == "cpu" else "own", dtype, mesh["node"].get_group() if replicated else None)
    if not replicated:
        mesh = init_device_mesh(device, (sizes[0] * sizes[1],))
    elif isinstance(custom, Reduces):
        mesh = mesh["gpu"]
    for part in (*model.layers, model):
        if compiled and part is not model:
            part.compile(fullgraph=True, dynamic=False)
        after = False if held else None
        fully_shard(part, mesh=mesh, reshard_after_forward=after, mp_policy=MixedPrecisionPolicy(dtype))
        if custom:
            custom.take_over(part)
    _prefetch(model, prefetch)
    if device == "cpu":
        model._set_unshard_async_op(True)
    return model, custom.settle if custom else lambda: None


def _custom(reduces: How, dtype: torch.dtype | None, over_nodes: dist.ProcessGroup | None) -> Exchange | None:
    """What takes the place of FSDP2's own reduce-scatter."""
    if not reduces.endswith("background"):
        return Exchange() if reduces == "exchanged" else None
    if dtype:
        raise ValueError("FSDP2 casts a reduced gradient at once; what runs in the background is not there yet")
    return Reduces(over_nodes, exchange if reduces.startswith("exchanged") else scatter)


def _prefetch(model: Llama, count: int) -> None:
    """Each part gathers the next few, in the forward and in the backward."""
    forward, backward = [model, *model.layers], [model, *reversed(model.layers)]
    for i, part in enumerate(forward):
        part.set_modules_to_forward_prefetch(forward[i + 1 : i + 1 + count])
    for i, part in enumerate(backward):
        part.set_modules_to_backward_prefetch(backward[i + 1 : i + 1 + count])


def scatter(
    out: torch.Tensor, value: torch.Tensor, group: dist.ProcessGroup, op: Any
) -> tuple[dist.Work, Callable[[], Any]]:
    return dist.reduce_scatter_tensor(out, value, op, group, async_op=True), lambda: None


def exchange(
    out: torch.Tensor, value: torch.Tensor, group: dist.ProcessGroup, op: Any
) -> tuple[dist.Work, Callable[[], Any]]:
    """Sends half of what Gloo's own reduce-scatter sends, which is an all-reduce."""
    pieces = torch.empty_like(value)
    work = dist.all_to_all_single(pieces, value, group=group, async_op=True)

    def add() -> None:
        torch.sum(pieces.view(group.size(), -1), 0, out=out)
        if op == dist.ReduceOp.AVG:
            out.div_(group.size())

    return work, add


class Exchange:
    """A reduce-scatter for `set_custom_reduce_scatter`."""

    def take_over(self, part: FSDPModule) -> None:
        part.set_custom_reduce_scatter(self)

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        work, finish = exchange(output_tensor, input_tensor, group, op)
        work.wait()
        finish()

    def settle(self) -> None:
        """Nothing is in flight."""


class Reduces(Exchange):
    """Reduce-scatters as a stream would run them: the thread that starts one goes on, unless one is in flight."""

    def __init__(self, over_nodes: dist.ProcessGroup | None, start: Start = scatter):
        self.over_nodes, self.start = over_nodes, start
        self.queue: SimpleQueue[Callable[[], Any]] = SimpleQueue()
        self.scattered: list[dist.Work] = []
        self.open = 0
        self.idle = threading.Condition()
        threading.Thread(target=self._run, daemon=True).start()

    def take_over(self, part: FSDPModule) -> None:
        super().take_over(part)
        if self.over_nodes:
            part.set_all_reduce_hook(self.all_reduce)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        if self.scattered:
            self.scattered.pop().wait()
        work, finish = self.start(output_tensor, input_tensor, group, op)
        self.scattered.append(work)
        self._put(lambda: (work.wait(), finish(), input_tensor))

    def all_reduce(self, output: torch.Tensor) -> None:
        """Over the nodes, behind its reduce-scatter."""
        self._put(lambda: dist.all_reduce(output, dist.ReduceOp.AVG, self.over_nodes))

    def _put(self, call: Callable[[], Any]) -> None:
        with self.idle:
            self.open += 1
        self.queue.put(call)

    def _run(self) -> None:
        while True:
            self.queue.get()()
            with self.idle:
                self.open -= 1
                self.idle.notify_all()

    def settle(self) -> None:
        with self.idle:
            self.idle.wait_for(lambda: not self.open)
        self.scattered.clear()
