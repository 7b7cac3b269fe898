"""Several hosts with slow links on one machine: network namespaces, joined by a bridge, each uplink shaped by `tc`.

    with Hosts(2) as hosts:
        hosts.rate("400mbit")
        hosts.torchrun(["train.py"], processes=2)
        print(hosts.sent_bytes(0))

Processes, Gloo and TCP are real; links inside a host are as fast as the machine. There is no delay and no loss, only
bandwidth: what arrives is about 0.955 of the nominal rate. Needs root and iproute2.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType

NETWORK = "10.77.0"
"""Of the first three numbers of all addresses; host i has the fourth, FIRST + i."""
FIRST = 10
BURST, LIMIT = "128kb", "1mb"
"""Of the token bucket: what may go at once, and what may wait."""
CONGESTION = "cubic"
"""How TCP answers congestion, whatever this machine's default is. Under BBR a connection sends next to nothing for
0.2 s in ten, to see how fast an empty link is, and all ranks wait for it."""
GRACE_S = 15.0
"""When one host has failed, the others have this long to say why; what is told to end has this long to do it."""
LIBC = ctypes.CDLL(None, use_errno=True)
PR_SET_PDEATHSIG = 1


class Missing(Exception):
    """This machine cannot make hosts."""


class Hosts:
    """`count` hosts, while this is open. Raises `Missing`, with what to do, where they cannot be made."""

    def __init__(self, count: int):
        self.count = count
        self.prefix = f"shardc{os.getpid()}"
        self.names = [f"{self.prefix}h{i}" for i in range(count)]
        self.switch = f"{self.prefix}s"

    def __enter__(self) -> Hosts:
        check()
        remove_left_behind()
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def _make(self) -> None:
        _run("ip", "netns", "add", self.switch)
        _run("ip", "-n", self.switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", self.switch, "link", "set", "bridge", "up")
        for i, name in enumerate(self.names):
            _run("ip", "netns", "add", name)
            port = ["type", "veth", "peer", "name", f"port{i}", "netns", self.switch]
            _run("ip", "link", "add", "eth0", "netns", name, *port)
            _run("ip", "-n", name, "addr", "add", f"{self.address(i)}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _run("ip", "-n", name, "link", "set", device, "up")
            _govern(name, "eth0", f"{NETWORK}.0/24")
            _govern(name, "eth0", f"local {self.address(i)} table local")
            _run("ip", "-n", self.switch, "link", "set", f"port{i}", "master", "bridge")
            _run("ip", "-n", self.switch, "link", "set", f"port{i}", "up")

    def _remove(self) -> None:
        for name in namespaces() & {*self.names, self.switch}:
            end_processes(name)
            _run("ip", "netns", "del", name)

    def address(self, host: int) -> str:
        return f"{NETWORK}.{FIRST + host}"

    def rate(self, rate: str | None) -> None:
        """Of every link, both ways, as `tc` spells it ("400mbit"); None: as fast as it goes."""
        for i, name in enumerate(self.names):
            _shape(name, "eth0", rate)
            _shape(self.switch, f"port{i}", rate)

    def sent_bytes(self, host: int) -> int:
        """That a host has sent over its link so far."""
        found = json.loads(_run("ip", "-n", self.names[host], "-s", "-j", "link", "show", "eth0"))
        return int(found[0]["stats64"]["tx"]["bytes"])

    def torchrun(
        self, command: Sequence[str], *, processes: int, timeout_s: float = 600.0, env: Mapping[str, str] | None = None
    ) -> str:
        """What rank 0's host printed. `env` is added to this process's. Raises `RuntimeError` with the last lines of
        all where one fails or does not end in time. When this returns or raises, all that it started has ended."""
        port = random.randrange(20000, 30000)
        quiet = {"GLOO_SOCKET_IFNAME": "eth0", "TP_SOCKET_IFNAME": "eth0", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        given = {"OMP_NUM_THREADS": "1", **os.environ, **quiet, **(env or {})}
        with tempfile.TemporaryDirectory() as folder:
            logs = [Path(folder, str(i)) for i in range(self.count)]
            commands = [self._launched(i, command, processes, port) for i in range(self.count)]
            codes = self._run_all(commands, logs, given, timeout_s)
            texts = [log.read_text(errors="replace") for log in logs]
        if any(code != 0 for code in codes):
            ends = "\n".join(f"--- host {i}\n{text[-6000:]}" for i, text in enumerate(texts))
            raise RuntimeError(f"exit codes {codes} (None: did not end) of {' '.join(command)}\n{ends}")
        return texts[0]

    def _run_all(
        self, commands: Sequence[Sequence[str]], logs: Sequence[Path], env: Mapping[str, str], timeout_s: float
    ) -> list[int | None]:
        """The exit code of each, or None where it was still running in the end."""
        running: list[subprocess.Popen[bytes]] = []
        with ExitStack() as stack:
            files = [stack.enter_context(log.open("wb")) for log in logs]
            try:
                for command, file in zip(commands, files, strict=True):
                    running.append(
                        subprocess.Popen(
                            command, stdout=file, stderr=subprocess.STDOUT, env=env, preexec_fn=end_with_parent
                        )
                    )
                return wait_for(running, timeout_s)
            finally:
                for name in self.names:
                    end_processes(name)
                for process in running:
                    process.wait()

    def _launched(self, host: int, command: Sequence[str], processes: int, port: int) -> list[str]:
        return [
            *("ip", "netns", "exec", self.names[host]),
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", str(self.count), "--node-rank", str(host)),
            *("--nproc-per-node", str(processes), "--master-addr", self.address(0), "--master-port", str(port)),
            *("--local-addr", self.address(host), *command),
        ]


def check() -> None:
    """Raises `Missing` where hosts cannot be made."""
    if not sys.platform.startswith("linux"):
        raise Missing("Hosts are network namespaces, which Linux has.")
    if lacking := [tool for tool in ("ip", "tc") if not shutil.which(tool)]:
        raise Missing(f"There is no {' and no '.join(lacking)}: apt-get install iproute2.")
    if os.geteuid() != 0:
        raise Missing("Network namespaces are made by root only: run this with sudo.")
    name = f"shardc{os.getpid()}t"
    try:
        _run("ip", "netns", "add", name)
    except RuntimeError as error:
        raise Missing(f"The kernel makes no network namespaces: {error} (in a container: --privileged).") from error
    try:
        _shape(name, "lo", "1gbit")
        _run("ip", "-n", name, "link", "set", "lo", "up")
        _govern(name, "lo", "local 127.0.0.0/8 table local")
    except RuntimeError as error:
        needed = f"it needs the modules sch_tbf and tcp_{CONGESTION}"
        raise Missing(f"The kernel shapes no links: {error} ({needed}).") from error
    finally:
        _run("ip", "netns", "del", name)


def _shape(space: str, device: str, rate: str | None) -> None:
    shape = ["tbf", "rate", rate, "burst", BURST, "limit", LIMIT] if rate else ["noqueue"]
    _run("tc", "-n", space, "qdisc", "replace", "dev", device, "root", *shape)


def _govern(space: str, device: str, route: str) -> None:
    """What goes that way, by `CONGESTION`: a namespace may not choose its default, but a route can."""
    _run("ip", "-n", space, "route", "replace", *route.split(), "dev", device, "congctl", CONGESTION)


def namespaces() -> set[str]:
    return {line.split()[0] for line in _run("ip", "netns", "list").splitlines() if line.strip()}


def remove_left_behind() -> None:
    """Hosts of a run that was killed. Its processes have ended with it (`end_with_parent`)."""
    for name in namespaces():
        made_by = re.fullmatch(r"shardc(\d+)(h\d+|s|t)", name)
        if made_by and not Path("/proc", made_by[1]).exists():
            _run("ip", "netns", "del", name)


def end_processes(name: str) -> None:
    """All that run in a namespace of ours, where nobody else has started any."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        until = time.monotonic() + GRACE_S
        for pid in _pids(name):
            with suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(pid, number)
        while _pids(name) and time.monotonic() < until:
            time.sleep(0.1)


def _pids(name: str) -> list[int]:
    return [int(pid) for pid in _run("ip", "netns", "pids", name).split()]


def end_with_parent() -> None:
    """Called in a new process: it is told to end when its parent dies, however that comes about."""
    if LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM):
        raise OSError(ctypes.get_errno(), "prctl has refused")


def wait_for(running: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> list[int | None]:
    """Exit codes when all have ended, or when time is over; or soon after one has failed, for the others then wait for
    what does not come."""
    until = time.monotonic() + timeout_s
    while None in (codes := [process.poll() for process in running]) and time.monotonic() < until:
        if any(codes):
            until = min(until, time.monotonic() + GRACE_S)
        time.sleep(0.1)
    return codes


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"`{' '.join(command)}`: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout
