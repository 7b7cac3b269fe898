"""Doctor: does an installation work, from torch to a training step; and under a launcher, do its ranks and links.

    python -m shardc doctor
    torchrun --nproc-per-node 4 -m shardc doctor

Every check says what it found; one that fails says what to do. What a check raises is its finding.
"""

from __future__ import annotations

import os
import shutil
import socket
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from passes.errors import Error
from shardc import _torch
from shardc.calibrate import one_by_one, summary
from shardc.compile import compile as compile_model
from shardc.gauge import own_tflops
from shardc.near import near
from shardc.plan import Plan
from shardc.topology import Topology
from shardc.trace import trace

SIZES = (1 << 12, 1 << 18, 1 << 22)
"""Bytes that links are tried with."""
SLOWER = 0.8
"""Of the median rank's speed, what a rank has to reach."""
LOOKS = 3
"""At ranks that seem slow."""
CLOSE = 1e-5
"""Relative difference that training may have from one process's."""


def versions() -> str:
    _torch.check_version()
    if _torch.version() > _torch.NEWEST:
        raise Error(f"torch {torch.__version__} is newer than shardc was tried with", fix="at your own risk, or 2.15")
    if lacking := _torch.self_test():
        raise Error(" ".join(lacking), fix="a torch that shardc supports, 2.11 to 2.15, as it was built")
    return f"torch {torch.__version__}, Python {sys.version.split()[0]}"


def devices() -> str:
    if not torch.cuda.is_available():
        return f"no GPU; {os.cpu_count()} CPU cores, Gloo"
    if not dist.is_nccl_available():
        raise Error("there are GPUs, but this torch has no NCCL", fix="a build of torch with NCCL")
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return f"{len(names)} x {names[0]}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"


def compiler() -> str:
    if not (found := shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")):
        raise Error("there is no C++ compiler for Inductor", fix="apt-get install g++, or backend='eager'")
    return found


def pictures() -> str:
    with tempfile.TemporaryDirectory() as folder:
        trace(_model(), Plan.zero3(Topology(node=2, gpu=2)), _batch()).svg(folder)
        count = len(list(Path(folder).glob("*.svg")))
    return f"{count} graphs drawn"


def training() -> str:
    """Three steps of the ranks there are, against the same in one process."""
    world = dist.get_world_size()
    losses = {name: _losses(compiled) for name, compiled in (("one process", False), ("sharded", True))}
    worst = max(abs(a - b) / abs(a) for a, b in zip(*losses.values(), strict=True))
    if not worst < CLOSE:
        raise Error(f"training differs from one process by {worst:.1e}: {losses}", fix="please report this")
    return f"a model trains on {world} rank{'s' * (world > 1)} as in one process (difference {worst:.0e})"


def links() -> str:
    """Raises for an axis that is faster than one inside it, and for a rank that computes slower than others."""
    topology = one_by_one(Topology.from_torchrun(), SIZES)
    used = [(axis, topology.link(axis).gb_per_s) for axis, size in topology.inner if size > 1]
    for (inner, fast), (outer, slow) in pairwise(used):
        if slow > 1.5 * fast:
            raise Error(
                f"axis {outer!r} ({slow:.2f} GB/s) is faster than {inner!r} inside it ({fast:.2f} GB/s)",
                fix="name the faster one last: rungs begin at the innermost axis",
            )
    if ranks := slow_ranks():
        raise Error(
            f"ranks {ranks} compute at less than {SLOWER:.0%} of the others' speed; every step waits for them",
            fix="see what else runs on their hosts, and how they are cooled",
        )
    return "\n" + summary(topology) + _shared() + _congested()


def _shared() -> str:
    """Whether ranks of one host share memory, where NCCL does not see to that."""
    if not _torch.is_gloo(dist.group.WORLD):
        return ""
    return f"\nrank 0 shares memory with {len(near(dist.group.WORLD).peers)} of {dist.get_world_size() - 1} other ranks"


def _congested() -> str:
    """What to know of how TCP answers congestion by default here."""
    with socket.socket() as unused:
        name = unused.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()
    if name != "bbr":
        return ""
    return (
        "\nTCP answers congestion by bbr on rank 0's host: a connection sends next to nothing for 0.2 s in ten, and "
        "every rank waits for it. Where hosts are joined by TCP: sysctl net.ipv4.tcp_congestion_control=cubic on each."
    )


def slow_ranks() -> list[int]:
    """Those that were slow whenever they were looked at: what disturbs one for a moment makes it no slow rank."""
    best = [0.0] * dist.get_world_size()
    for _ in range(LOOKS):
        best = [max(pair) for pair in zip(best, _rates(), strict=True)]
        slow = [rank for rank, rate in enumerate(best) if rate < SLOWER * statistics.median(best)]
        if not slow:
            break
    return slow


def _rates() -> list[float]:
    """Of matrix products, by rank."""
    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    mine = torch.tensor(own_tflops(device), dtype=torch.float64, device=device)
    found = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    return [float(rate) for rate in found]


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))


def _batch() -> torch.Tensor:
    return torch.linspace(-1, 1, 128).view(8, 16)


def _losses(sharded: bool) -> list[float]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = _model().to(device)
    if sharded:
        model = compile_model(model, Plan.zero3(Topology(rank=dist.get_world_size())), progress=lambda text: None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(_batch().to(device)).square().mean()
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found


CHECKS = (versions, devices, compiler, pictures, training)
"""`links` comes behind them, where there are some."""


def examined(checks: Sequence[Callable[[], str]]) -> Iterator[tuple[str, bool, str]]:
    """(name, whether it is well, what was found) of each check."""
    for check in checks:
        try:
            yield check.__name__, True, check()
        except Error as error:
            yield check.__name__, False, str(error)
        except Exception as error:  # whatever it is, it is what this machine does
            yield check.__name__, False, f"{type(error).__name__}: {error}"


@contextmanager
def _group(launched: bool) -> Iterator[None]:
    """A process group of all ranks, or of this process alone."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if launched:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


# The command


def add_to(commands: Any) -> None:
    command = commands.add_parser("doctor", help="check an installation; under torchrun, its ranks and links too")
    command.set_defaults(run=run)


def run(options: Any) -> None:
    """Raises `Error` where a check fails."""
    launched = "RANK" in os.environ or "SLURM_PROCID" in os.environ
    with _group(launched):
        checks = (*CHECKS, *([links] if launched else []))
        ill = []
        for name, well, says in examined(checks):
            ill += [] if well else [name]
            if dist.get_rank() == 0 or not well:
                print(f"{'ok' if well else 'FAILS':<6} {name:<10} {says}", flush=True)
    if ill:
        raise Error(f"Not well: {', '.join(ill)}.", fix="What to do is said above.")
    if not launched:
        print("For links between ranks: torchrun --nproc-per-node ... -m shardc doctor")
