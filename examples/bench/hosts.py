"""Several hosts with slow links on one machine: network namespaces, joined by a bridge, each uplink shaped by `tc`.

    with Hosts(2) as hosts:
        hosts.rate("400mbit")
        hosts.torchrun(["train.py"], processes=2)
        print(hosts.sent_bytes(0))

Processes, Gloo and TCP are real; links inside a host are as fast as the machine. There is no delay and no loss, only
bandwidth: what arrives is about 0.955 of the nominal rate. Needs root and iproute2.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

NETWORK = "10.77.0"
"""Of the first three numbers of all addresses; host i has the fourth, FIRST + i."""
FIRST = 10
BURST, LIMIT = "128kb", "1mb"
"""Of the token bucket: what may go at once, and what may wait."""


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
        try:
            self._make()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in (*self.names, self.switch):
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL)

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
            _run("ip", "-n", self.switch, "link", "set", f"port{i}", "master", "bridge")
            _run("ip", "-n", self.switch, "link", "set", f"port{i}", "up")

    def address(self, host: int) -> str:
        return f"{NETWORK}.{FIRST + host}"

    def rate(self, rate: str | None) -> None:
        """Of every link, both ways, as `tc` spells it ("400mbit"); None: as fast as it goes."""
        for i, name in enumerate(self.names):
            for space, device in ((name, "eth0"), (self.switch, f"port{i}")):
                subprocess.run(["tc", "-n", space, "qdisc", "del", "dev", device, "root"], stderr=subprocess.DEVNULL)
                if rate:
                    shape = ["tbf", "rate", rate, "burst", BURST, "limit", LIMIT]
                    _run("tc", "-n", space, "qdisc", "add", "dev", device, "root", *shape)

    def sent_bytes(self, host: int) -> int:
        """That a host has sent over its link so far."""
        counter = "/sys/class/net/eth0/statistics/tx_bytes"
        return int(_run("ip", "netns", "exec", self.names[host], "cat", counter))

    def torchrun(self, command: Sequence[str], *, processes: int, timeout_s: float = 600.0) -> str:
        """What rank 0's host printed. Raises `RuntimeError` with the last lines of all where one fails."""
        port = random.randrange(20000, 30000)
        quiet = {"GLOO_SOCKET_IFNAME": "eth0", "TP_SOCKET_IFNAME": "eth0", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        env = {**os.environ, **quiet, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        with tempfile.TemporaryDirectory() as folder:
            logs = [Path(folder, str(i)) for i in range(self.count)]
            running = [
                subprocess.Popen(
                    self._launched(i, command, processes, port), stdout=log.open("w"), stderr=subprocess.STDOUT, env=env
                )
                for i, log in enumerate(logs)
            ]
            try:
                codes = [process.wait(timeout_s) for process in running]
            finally:
                for process in running:
                    process.terminate()
            texts = [log.read_text() for log in logs]
        if any(codes):
            ends = "\n".join(f"--- host {i}\n{text[-3000:]}" for i, text in enumerate(texts))
            raise RuntimeError(f"exit codes {codes} of {' '.join(command)}\n{ends}")
        return texts[0]

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
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        raise Missing(f"The kernel makes no network namespaces: {made.stderr.strip()} (in a container: --privileged).")
    _run("ip", "netns", "del", name)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
