"""World: run a function on N real Gloo processes.

    def greet(name):
        dist.barrier()
        return f"{name} from {dist.get_rank()}"

    assert run(greet, 2, "hello") == ["hello from 0", "hello from 1"]

Processes are forked from a server that has imported torch and traced a model already, so a launch costs tenths of a
second. The function is a module's (it is pickled by name), and what it returns comes back, a value a rank.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection, wait
from typing import Any

from shardc.heap import MMAP_THRESHOLD

PRELOADED = ["torch.distributed.tensor", "torch._dynamo", "torch._functorch.aot_autograd", "shardc"]
_ENV = {
    "OMP_NUM_THREADS": "1",
    # Inductor would start a pool of compile workers in every rank.
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
}
_GRACE_S = 3.0
"""After one rank failed, the others have this long to say why they did."""


class RankError(AssertionError):
    """A rank raised, died or did not finish; the message has its traceback."""


def run(function: Callable[..., Any], world: int, *args: Any, timeout_s: float = 900.0) -> list[Any]:
    """`function(*args)` on `world` ranks of a Gloo process group; returns what each returns. Raises `RankError`. The
    limit ends what hangs: a slow machine that has other work may take minutes to compile."""
    import torch.distributed as dist

    # The store is this process's, as under torchrun: it outlives any rank.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    deadline = time.monotonic() + timeout_s
    started = [_start(rank, world, store.port, timeout_s, function, args) for rank in range(world)]
    try:
        return _collect([pipe for _, pipe in started], deadline, timeout_s)
    finally:
        for process, _ in started:
            process.join(0.5)
            process.kill()
            process.join()


def _start(rank: int, world: int, port: int, timeout_s: float, function: Callable[..., Any], args: Any) -> Any:
    ours, theirs = _context().Pipe(duplex=False)
    process = _context().Process(
        target=_rank, args=(rank, world, port, timeout_s, function, args, theirs), daemon=True, name=f"rank {rank}"
    )
    process.start()
    # Ours is the only reading end and theirs the only writing end, so the death of a rank ends its pipe.
    theirs.close()
    return process, ours


@cache
def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with _environment(PYTHONPATH=os.pathsep.join(sys.path), **_ENV):
        multiprocessing.forkserver.ensure_running()
    return context


@contextmanager
def _environment(**changes: str) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _rank(
    rank: int, world: int, port: int, timeout_s: float, function: Callable[..., Any], args: Any, pipe: Connection
) -> None:
    import logging

    import torch
    import torch.distributed as dist

    # DTensor's advice at every `full_tensor()`.
    logging.disable(logging.WARNING)
    timeout = timedelta(seconds=timeout_s)
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
        message = (True, pickle.dumps(function(*args)))
    except BaseException:
        message = (False, traceback.format_exc())
    pipe.send(message)
    # Gloo aborts in a process that exits with a group.
    if dist.is_initialized():
        dist.destroy_process_group()


def _collect(pipes: list[Connection], deadline: float, timeout_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    while len(results) + len(failures) < len(pipes):
        open_pipes = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in results and rank not in failures}
        ready = wait(list(open_pipes), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            rank = open_pipes[pipe]
            good, value = _receive(pipe)
            if good:
                results[rank] = pickle.loads(value)
            elif not failures:
                deadline = min(deadline, time.monotonic() + _GRACE_S)
            if not good:
                failures[rank] = value
    if len(results) < len(pipes):
        raise RankError(_report(failures, sorted(set(range(len(pipes))) - set(results) - set(failures)), timeout_s))
    return [results[rank] for rank in range(len(pipes))]


def _receive(pipe: Any) -> tuple[bool, Any]:
    try:
        return pipe.recv()
    except EOFError:
        return False, "the process died without a word (a crash in native code, or it was killed)\n"


def _report(failures: dict[int, str], missing: list[int], timeout_s: float) -> str:
    """The first failure in full; of the others, which often follow from it, the last line."""
    lines = []
    for i, (rank, text) in enumerate(failures.items()):
        lines.append(f"rank {rank}:\n{text}" if i == 0 else f"rank {rank}: {text.strip().splitlines()[-1]}")
    if missing:
        lines.append(f"ranks {missing} did not finish" + ("" if failures else f" within {timeout_s:.0f} s"))
    return "\n".join(lines)


def pages_return_when_freed() -> None:
    """In this process, where a model has been compiled: otherwise glibc keeps them for later, and resident memory says
    little about what was alive."""
    ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, 1 << 20)
