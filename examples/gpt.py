"""A byte-level GPT, as plain as a GPT can be written: nothing in it knows of ranks, shards or meshes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    """1.9 million parameters unless told otherwise."""

    vocab: int = 256
    context: int = 128
    layers: int = 4
    heads: int = 6
    dim: int = 192


class GPT(nn.Module):
    """Bytes [batch, time] in; with targets their mean cross-entropy in nats a byte, without targets the logits."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                depth = 2 * config.layers if name.endswith(("out.weight", "down.weight")) else 1
                nn.init.normal_(parameter, std=(parameter.shape[1] * depth) ** -0.5)

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor:
        cos, sin = rotary(ids.shape[1], self.config.dim // self.config.heads, ids.device)
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = self.head(self.norm(x))
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Block(nn.Module):
    """One layer: attention, then an MLP, each behind a norm and beside a residual."""

    def __init__(self, config: Config):
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.dim)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, config: Config):
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.dim, 3 * config.dim, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, time, dim = x.shape
        qkv = self.qkv(x).view(batch, time, 3, self.heads, dim // self.heads)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        y = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, time, dim))


class MLP(nn.Module):
    """Two linear layers around a GELU."""

    def __init__(self, config: Config):
        super().__init__()
        self.up = nn.Linear(config.dim, 4 * config.dim, bias=False)
        self.down = nn.Linear(4 * config.dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


def rotary(time: int, channels: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine, both [time, channels / 2], of the angles by which `rotate` turns each pair of channels."""
    half = channels // 2
    frequency = 1000.0 ** -(torch.arange(half, device=device) / half)
    angle = torch.arange(time, device=device)[:, None] * frequency
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [batch, heads, time, channels] with position written into it as an angle."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)
