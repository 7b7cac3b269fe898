"""The doctor: what is well is said to be, and what is not comes with what to do."""

from __future__ import annotations

import subprocess
import sys

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


@pytest.mark.slow
def test_under_a_launcher_ranks_train_together_and_links_are_measured() -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "shardc"]
    done = subprocess.run([*launch, "doctor"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split()[:2] for line in done.stdout.splitlines() if line.startswith(("ok", "FAILS"))]
    assert lines == [["ok", check.__name__] for check in (*doctor.CHECKS, doctor.links)]
    assert "GB/s a rank" in done.stdout
