"""State: what is saved under one plan goes on under another, with torch's own tools and from safetensors files."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

import models
import shardc
from loops import update
from training import adamw
from world import pages_return_when_freed, run

TOPOLOGY = shardc.Topology(node=2, gpu=2)
IIG, ZERO3 = shardc.Plan.paro(TOPOLOGY, "IIG"), shardc.Plan.zero3(TOPOLOGY)
OTHERS = [
    shardc.Plan.ddp(TOPOLOGY),
    shardc.Plan.zero3(shardc.Topology(node=1, gpu=3)),
    shardc.Plan.zero1(shardc.Topology(gpu=2)),
]
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)

pytestmark = pytest.mark.slow


def compiled(plan: shardc.Plan, make: Callable[[], nn.Module] = models.gpt, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return shardc.compile(make(), plan, backend="eager", progress=lambda line: None, **options)


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().full_tensor() for name, p in model.named_parameters()}


def same(model: nn.Module, other: nn.Module) -> bool:
    """Each may be sharded or not."""
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return all(torch.equal(_full(p), _full(q)) for p, q in pairs)


def _full(p: Tensor) -> Tensor:
    return p.full_tensor() if hasattr(p, "full_tensor") else p


# torch.distributed.checkpoint


class Application:
    """Model and optimizer, as torch's documentation has it."""

    def __init__(self, plan: shardc.Plan):
        self.model = compiled(plan)
        self.optimizer = adamw(self.model.parameters())

    def train(self, steps: range) -> list[float]:
        return [update(self.model, self.optimizer, step) for step in steps]

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def saved_half_way(path: str, asynchronously: bool) -> list[float]:
    """Losses of the steps that follow."""
    application = Application(IIG)
    application.train(range(2))
    state = {"app": application.state_dict()}
    if asynchronously:
        saving = dcp.async_save(state, checkpoint_id=path)
        losses = application.train(range(2, 4))
        saving.result()
        return losses
    dcp.save(state, checkpoint_id=path)
    return application.train(range(2, 4))


def resumed(plan: shardc.Plan, path: str) -> list[float]:
    application = Application(plan)
    state = {"app": application.state_dict()}
    dcp.load(state, checkpoint_id=path)
    application.load_state_dict(state["app"])
    return application.train(range(2, 4))


@pytest.mark.parametrize(
    ("plans", "asynchronously"), [([IIG, *OTHERS], False), (OTHERS[:1], True)], ids=["save", "async save"]
)
def test_training_goes_on_under_other_plans_meshes_and_worlds(
    tmp_path: Path, plans: list[shardc.Plan], asynchronously: bool
) -> None:
    path = str(tmp_path / "checkpoint")
    expected = run(saved_half_way, 4, path, asynchronously)[0]
    for plan in plans:
        found = run(resumed, plan.topology.world, plan, path)[0]
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


# State dicts


def state_dicts() -> None:
    model, reference = compiled(IIG, models.tied_llama), models.tied_llama()
    assert list(model.state_dict()) == list(reference.state_dict())
    full = get_model_state_dict(model, options=FULL)
    assert (list(full) == list(reference.state_dict())) if dist.get_rank() == 0 else full == {}
    everywhere = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    reference.load_state_dict(everywhere)
    assert same(model, reference)
    other = compiled(OTHERS[0], models.tied_llama, init=None)
    with torch.no_grad():
        torch._foreach_zero_(list(other.parameters()))
    other.load_state_dict(everywhere)
    assert same(other, reference)
    with torch.no_grad():
        torch._foreach_zero_(list(other.parameters()))
    set_model_state_dict(other, full, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    assert same(other, reference)


def test_full_state_dicts_are_given_and_taken() -> None:
    run(state_dicts, 4)


def wrong_state_dicts() -> None:
    model = compiled(shardc.Plan.zero3(shardc.Topology(gpu=1)))
    state = model.state_dict()
    del state["norm.weight"]
    with pytest.raises(RuntimeError, match='Missing key.*"norm.weight"'):
        model.load_state_dict(state)
    with pytest.raises(RuntimeError, match="size mismatch for norm.weight"):
        model.load_state_dict({**state, "norm.weight": torch.ones(3)})
    with pytest.raises(shardc.Error, match=r"assign=True. would replace the parameters"):
        model.load_state_dict(state, assign=True)


def test_state_dicts_that_do_not_fit() -> None:
    run(wrong_state_dicts, 1)


# safetensors


def save_pieces(model: nn.Module, directory: Path) -> None:
    """Two files and an index, as large models come; tied parameters under one name."""
    state = {name: p.detach().clone() for name, p in model.state_dict().items()}
    state.pop("model.embed_tokens.weight", None)
    names = list(state)
    index = {}
    for i, part in enumerate((names[::2], names[1::2])):
        file = f"model-{i}.safetensors"
        save_file({name: state[name] for name in part}, directory / file)
        index |= dict.fromkeys(part, file)
    lines = ", ".join(f'"{name}": "{file}"' for name, file in index.items())
    (directory / "model.safetensors.index.json").write_text(f'{{"weight_map": {{{lines}}}}}')


def loaded_from(directory: str, seed: int, plans: list[shardc.Plan]) -> None:
    torch.manual_seed(seed)
    reference = models.tied_llama()
    for plan in plans:
        model = compiled(plan, lambda: on_meta(models.tied_llama), weights=directory)
        assert same(model, reference)
        ids = torch.ones(1, 3, dtype=torch.long)
        torch.testing.assert_close(model(ids).logits, reference(ids).logits)
    bf16 = compiled(plans[0], lambda: models.tied_llama().bfloat16())
    assert shardc.load(bf16, directory, progress=False) == []
    assert same(bf16, reference.bfloat16())


UNEVEN = shardc.Topology(node=3, gpu=2)  # by which few of the model's rows divide


@pytest.mark.parametrize("plans", [[IIG, OTHERS[0], ZERO3], [shardc.Plan.paro(UNEVEN, "IIG")]], ids=["2x2", "3x2"])
def test_a_model_on_meta_reads_its_own_rows_from_safetensors(tmp_path: Path, plans: list[shardc.Plan]) -> None:
    torch.manual_seed(7)
    save_pieces(models.tied_llama(), tmp_path)
    run(loaded_from, plans[0].topology.world, str(tmp_path), 7, plans)


def misfits(directory: str) -> None:
    model = compiled(shardc.Plan.zero3(shardc.Topology(gpu=1)))
    before = values(model)
    with pytest.raises(shardc.Error) as error:
        shardc.load(model, directory, progress=False)
    assert "2 of the model's parameters and buffers do not fit the files" in str(error.value)
    assert "head.weight is [3, 10], the model's is [13, 10]" in str(error.value)
    assert "norm.weight is not there (the closest name is norms.weight)" in str(error.value)
    assert all(torch.equal(value, before[name]) for name, value in values(model).items())
    with pytest.raises(shardc.Error, match="There are no weights at .*nowhere"):
        shardc.load(model, f"{directory}/nowhere", progress=False)
    Path(f"{directory}/half.safetensors").write_bytes(Path(f"{directory}/model.safetensors").read_bytes()[:100])
    with pytest.raises(shardc.Error, match="half.safetensors is not a whole safetensors file"):
        shardc.load(model, f"{directory}/half.safetensors", progress=False)


def test_files_that_do_not_fit_change_nothing(tmp_path: Path) -> None:
    state = {name: torch.zeros_like(p) for name, p in models.gpt().state_dict().items()}
    state["norms.weight"] = state.pop("norm.weight")
    state["head.weight"] = torch.zeros(3, 10)
    save_file(state, tmp_path / "model.safetensors")
    run(misfits, 1, str(tmp_path))


# Memory


def peak_mib(action: Callable[[], Any]) -> int:
    """How much higher the memory of this process rises. Pages of files are the kernel's, to give away as it likes."""
    seen, done = [_anonymous()], threading.Event()

    def look() -> None:
        while not done.wait(0.001):
            seen.append(_anonymous())

    thread = threading.Thread(target=look)
    thread.start()
    kept = action()
    done.set()
    thread.join()
    del kept
    return max(seen) - seen[0]


def _anonymous() -> int:
    return int(Path("/proc/self/status").read_text().partition("RssAnon:")[2].split()[0]) >> 10


def wide() -> nn.Module:
    return models.Wide(1024, 48)


def peaks(directory: str) -> tuple[int, int]:
    """Of loading a shard, and of gathering the full state dict on rank 0."""
    get_model_state_dict(compiled(ZERO3, lambda: models.Wide(8, 2)), options=FULL)
    pages_return_when_freed()
    model = compiled(ZERO3, lambda: on_meta(wide), weights=directory)
    return (
        peak_mib(lambda: compiled(ZERO3, lambda: on_meta(wide), weights=directory)),
        peak_mib(lambda: get_model_state_dict(model, options=FULL)),
    )


def test_loading_takes_a_shard_and_a_full_state_dict_one_copy_on_rank_0(tmp_path: Path) -> None:
    save_file(wide().state_dict(), tmp_path / "model.safetensors")
    model, parameter = 48 * 4, 4
    found = run(peaks, 4, str(tmp_path))
    assert max(load for load, _ in found) < 1.2 * model / 4 + 2 * parameter, found
    assert found[0][1] < 1.1 * model + 4 * parameter, found
    assert max(gather for _, gather in found[1:]) < 8 * parameter, found
