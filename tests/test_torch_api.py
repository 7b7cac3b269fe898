"""Everything private that shardc needs of torch is there, on every supported version."""

from __future__ import annotations

import sys

from shardc import _torch


def test_this_torch_has_all_that_is_needed():
    assert _torch.self_test() == []


def test_what_is_missing_is_said_in_a_sentence(monkeypatch):
    import torch._inductor.compile_fx as compile_fx

    monkeypatch.delattr(compile_fx, "compile_fx_inner")
    (sentence,) = _torch.self_test()
    assert "lacks Inductor on one graph (torch._inductor.compile_fx.compile_fx_inner)." in sentence


def test_a_module_that_is_gone_is_missing_too(monkeypatch):
    assert _torch.self_test() == []  # imports what else is needed
    monkeypatch.setitem(sys.modules, "torch._functorch._aot_autograd.descriptors", None)
    assert len(_torch.self_test()) == 2
