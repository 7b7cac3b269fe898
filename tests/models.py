"""Models: what people train, small. Each takes ids and labels [batch, time] and ends in a loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from examples import gpt as examples_gpt
from training import VOCABULARY, small

Call = Callable[[nn.Module, int, Tensor, Tensor], Tensor]
"""(model, step, ids, labels) -> loss"""


def plain(model: nn.Module, step: int, ids: Tensor, labels: Tensor) -> Tensor:
    return model(ids, labels)


def as_transformers(model: nn.Module, step: int, ids: Tensor, labels: Tensor) -> Tensor:
    """The library's call. Language models are called with ids as their own labels; a call later they are others."""
    return model(ids, labels=ids if step == 0 else labels).loss


def gpt(layers: int = 2, width: int = 10) -> nn.Module:
    return examples_gpt.GPT(examples_gpt.Config(vocab=VOCABULARY, context=4, layers=layers, heads=1, dim=width))


class CheckpointedGPT(examples_gpt.GPT):
    """Activation checkpointing: the backward computes each block again."""

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor:
        cos, sin = examples_gpt.rotary(ids.shape[1], self.config.dim // self.config.heads, ids.device)
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, cos, sin, use_reentrant=False)
        logits = self.head(self.norm(x))
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def checkpointed_gpt(layers: int = 2) -> nn.Module:
    return CheckpointedGPT(examples_gpt.Config(vocab=VOCABULARY, context=4, layers=layers, heads=1, dim=10))


def llama(tied: bool = False, **changes: Any) -> nn.Module:
    """The default configuration (so it returns a cache too), only small."""
    from transformers import LlamaConfig, LlamaForCausalLM

    size = {"vocab_size": VOCABULARY, "hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return LlamaForCausalLM(LlamaConfig(tie_word_embeddings=tied, **size | heads | changes))


def tied_llama() -> nn.Module:
    return llama(tied=True)


def checkpointed_llama() -> nn.Module:
    model = llama()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


class Convolutional(nn.Module):
    """Batch statistics: three buffers that the forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 6)
        self.conv = nn.Conv1d(6, 5, kernel_size=3, padding=1, bias=False)
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, VOCABULARY)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids).transpose(1, 2)
        x = F.relu(self.norm(self.conv(x))).transpose(1, 2)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Derived(nn.Module):
    """Weights that are computed from parameters: two halves side by side, one times a learned scale."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 6)
        self.left = nn.Parameter(torch.randn(6, 5))
        self.right = nn.Parameter(torch.randn(6, 5))
        self.head = nn.Parameter(torch.randn(10, VOCABULARY))
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = torch.tanh(self.embed(ids) @ torch.cat([self.left, self.right], dim=1))
        return F.cross_entropy((x @ (self.head * self.scale)).flatten(0, 1), labels.flatten())


class Dropping(nn.Module):
    """Shows its mask: where the output is 0, the element was dropped."""

    def __init__(self, p: float = 0.5, checkpointed: bool = False):
        super().__init__()
        self.p, self.checkpointed = p, checkpointed
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 10))

    def block(self, x: Tensor) -> Tensor:
        return F.dropout(torch.tanh(x * self.weight), self.p, self.training)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False) if self.checkpointed else self.block(x)

    def masked(self, x: Tensor, mask: Tensor) -> Tensor:
        """The forward with a given mask."""
        return torch.tanh(x * self.weight) * mask / (1 - self.p)


class Choosing(nn.Module):
    """A random op that has no seed, in a checkpointed block."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def block(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight) * torch.multinomial(torch.ones(2, 4), 1)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False).sum()


class DroppingBlock(nn.Module):
    """One of many equal layers, with a random mask of its own."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class DroppingStack(nn.Module):
    """Equal layers with dropout."""

    def __init__(self, layers: int = 2, checkpointed: bool = False):
        super().__init__()
        self.checkpointed = checkpointed
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.blocks = nn.ModuleList(DroppingBlock(8) for _ in range(layers))
        self.head = nn.Linear(8, VOCABULARY, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 6).requires_grad_(False)
        self.lstm = nn.LSTM(6, 5, num_layers=2, batch_first=True)
        self.head = nn.Linear(5, VOCABULARY)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x, _ = self.lstm(self.embed(ids))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class OddlyNamed(nn.Module):
    """Names that FX would spell otherwise, two that differ only in what it drops, and one that it has a meaning for."""

    def __init__(self) -> None:
        super().__init__()
        self.LayerNorm = nn.LayerNorm(6)
        self.tangents_ = nn.ModuleDict({"0": nn.Embedding(VOCABULARY, 6)})
        self.a = nn.ModuleDict({"b_c": nn.Linear(6, 6)})
        self.a_b = nn.ModuleDict({"c": nn.Linear(6, VOCABULARY)})

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.a["b_c"](self.LayerNorm(self.tangents_["0"](ids)))
        return F.cross_entropy(self.a_b["c"](x).flatten(0, 1), labels.flatten())


class Wide(nn.Module):
    """Equal layers of `width` x `width`, as large as one likes."""

    def __init__(self, width: int, layers: int):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


class Bare(nn.Module):
    """A parameter that nobody gives a value."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight.t()).sum()


MODELS: dict[str, tuple[Callable[[], nn.Module], Call]] = {
    "gpt": (gpt, plain),
    "checkpointed gpt": (checkpointed_gpt, plain),
    "uneven, tied, frozen, 0-dim, unused": (small, plain),
    "batch norm": (Convolutional, plain),
    "derived weights": (Derived, plain),
    "lstm": (Recurrent, plain),
    "oddly named": (OddlyNamed, plain),
    "llama": (llama, as_transformers),
    "tied llama": (tied_llama, as_transformers),
    "checkpointed llama": (checkpointed_llama, as_transformers),
}
