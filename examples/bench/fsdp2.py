"""FSDP2 as a baseline, with its best prefetch settings; on a CPU with the overlap of reduces that a GPU would have."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from llama import Llama
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def sharded_by_fsdp2(
    model: Llama,
    device: str,
    sizes: Sequence[int],
    *,
    replicated: bool,
    compiled: bool,
    prefetch: int,
) -> tuple[Llama, Callable[[], None]]:
    """The model, and what waits for all reduces. `sizes` are nodes and GPUs a node; `replicated`: over the nodes."""
    mesh = init_device_mesh(device, tuple(sizes), mesh_dim_names=("node", "gpu"))
    reduces = Reduces(mesh["node"].get_group() if replicated else None) if device == "cpu" else None
    if not replicated:
        mesh = init_device_mesh(device, (sizes[0] * sizes[1],))
    elif reduces:
        mesh = mesh["gpu"]
    parts = [*model.layers, model]
    for part in parts:
        if compiled and part is not model:
            part.compile(fullgraph=True, dynamic=False)
        fully_shard(part, mesh=mesh)
    _prefetch(model, prefetch)
    if not reduces:
        return model, lambda: None
    model._set_unshard_async_op(True)
    for part in parts:
        part.set_custom_reduce_scatter(reduces)
        if replicated:
            part.set_all_reduce_hook(reduces.all_reduce)
    return model, reduces.settle


def _prefetch(model: Llama, count: int) -> None:
    """Each part gathers the next few, in the forward and in the backward."""
    forward, backward = [model, *model.layers], [model, *reversed(model.layers)]
    for i, part in enumerate(forward):
        part.set_modules_to_forward_prefetch(forward[i + 1 : i + 1 + count])
    for i, part in enumerate(backward):
        part.set_modules_to_backward_prefetch(backward[i + 1 : i + 1 + count])


class Reduces:
    """Reduce-scatters as a stream would run them: the thread that starts one goes on, unless one is in flight."""

    def __init__(self, over_nodes: dist.ProcessGroup | None):
        self.over_nodes = over_nodes
        self.queue: SimpleQueue[Callable[[], Any]] = SimpleQueue()
        self.scattered: list[dist.Work] = []
        self.open = 0
        self.idle = threading.Condition()
        threading.Thread(target=self._run, daemon=True).start()

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
        if self.scattered:
            self.scattered.pop().wait()
        work = dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op=True)
        self.scattered.append(work)
        self._put(lambda: (work.wait(), input_tensor))

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
