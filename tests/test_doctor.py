"""The doctor: what is well is said to be, and what is not comes with what to do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from passes.errors import Error
from shardc import _torch, doctor


def test_this_machine_is_well() -> None:
    found = list(doctor.examined([check for check in doctor.CHECKS if check is not doctor.training]))
    assert [name for name, well, _ in found if not well] == []


def test_what_a_check_raises_is_its_finding() -> None:
    def links() -> str:
        raise Error("no route", fix="plug it in")

    def devices() -> str:
        raise RuntimeError("CUDA error")

    assert list(doctor.examined([links, devices])) == [
        ("links", False, str(Error("no route", fix="plug it in"))),
        ("devices", False, "RuntimeError: CUDA error"),
    ]


def test_a_torch_that_lacks_something_is_not_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_torch, "self_test", lambda: ["torch lacks a wheel."])
    ((_, well, says),) = doctor.examined([doctor.versions])
    assert not well
    assert "torch lacks a wheel." in says


def test_a_compiler_that_is_missing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    ((_, well, says),) = doctor.examined([doctor.compiler])
    assert (well, "g++" in says) == (False, True)


@pytest.mark.parametrize(
    ("looks", "slow"), [([[9, 9, 9]], []), ([[9, 3, 9], [9, 9, 9]], []), ([[9, 3, 9], [9, 4, 9], [9, 5, 9]], [1])]
)
def test_a_rank_is_slow_that_is_slow_at_every_look(
    monkeypatch: pytest.MonkeyPatch, looks: list[list[float]], slow: list[int]
) -> None:
    monkeypatch.setattr(doctor.dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(doctor, "_rates", iter(looks).__next__)
    assert doctor.slow_ranks() == slow


@pytest.mark.parametrize(("name", "told"), [("bbr", True), ("cubic", False)])
def test_congestion_control_that_stalls_all_ranks_is_told(
    monkeypatch: pytest.MonkeyPatch, name: str, told: bool
) -> None:
    class Socket(doctor.socket.socket):
        def getsockopt(self, *option: int) -> bytes:
            return name.encode().ljust(option[-1], b"\0")

    monkeypatch.setattr(doctor.socket, "socket", Socket)
    assert ("tcp_congestion_control=cubic" in doctor._congested()) is told


@pytest.mark.slow
def test_under_a_launcher_ranks_train_together_and_links_are_measured(tmp_path: Path) -> None:
    script = tmp_path / "doctor.py"  # other tests run beside this one, and may well slow a rank down
    script.write_text("from shardc import __main__, doctor\ndoctor.SLOWER = 0.0\n__main__.main(['doctor'])\n")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(launch, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split()[:2] for line in done.stdout.splitlines() if line.startswith(("ok", "FAILS"))]
    assert lines == [["ok", check.__name__] for check in (*doctor.CHECKS, doctor.links)]
    assert "GB/s a rank" in done.stdout
