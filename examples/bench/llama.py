"""A Llama-like model for the benchmarks: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Config:
    dim: int = 384
    layers: int = 6
    heads: int = 8
    kv_heads: int = 8
    hidden: int = 1024
    vocab: int = 8192
    context: int = 128

    @classmethod
    def llama_70b(cls, layers: int = 80, context: int = 4096) -> Config:
        return cls(8192, layers, 64, 8, 28672, 128256, context)


class Attention(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.head_dim = c.dim // c.heads
        self.q = nn.Linear(c.dim, c.dim, bias=False)
        self.k = nn.Linear(c.dim, c.kv_heads * self.head_dim, bias=False)
        self.v = nn.Linear(c.dim, c.kv_heads * self.head_dim, bias=False)
        self.o = nn.Linear(c.dim, c.dim, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        q, k, v = (proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for proj in (self.q, self.k, self.v))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return self.o(y.transpose(1, 2).flatten(2))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


class Block(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.attention_norm = nn.RMSNorm(c.dim)
        self.attention = Attention(c)
        self.mlp_norm = nn.RMSNorm(c.dim)
        self.gate = nn.Linear(c.dim, c.hidden, bias=False)
        self.up = nn.Linear(c.dim, c.hidden, bias=False)
        self.down = nn.Linear(c.hidden, c.dim, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Recomputed(Block):
    """A block that keeps only what comes in, and computes the rest again in the backward."""

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, *args, use_reentrant=False)


def recomputed(model: Llama) -> Llama:
    """The same model, with blocks that are computed again."""
    for block in model.layers:
        block.__class__ = Recomputed
    return model


class Llama(nn.Module):
    """`model(ids, targets)` is the mean cross-entropy in nats."""

    def __init__(self, c: Config):
        super().__init__()
        self.config = c
        self.embed = nn.Embedding(c.vocab, c.dim)
        self.layers = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm = nn.RMSNorm(c.dim)
        self.head = nn.Linear(c.dim, c.vocab, bias=False)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        cos, sin = self.positions(ids.shape[1], x)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())

    def positions(self, length: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        half = self.config.dim // self.config.heads // 2
        rates = 10000.0 ** (-torch.arange(half, device=like.device) / half)
        angles = torch.outer(torch.arange(length, device=like.device), rates).repeat(1, 2)
        return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


class Adapted(nn.Module):
    """A frozen linear layer and beside it a product of two small ones (LoRA, arXiv 2106.09685), zero at first."""

    def __init__(self, linear: nn.Linear, rank: int):
        super().__init__()
        self.linear = linear
        self.down = nn.Linear(linear.in_features, rank, bias=False)
        self.up = nn.Linear(rank, linear.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.up(self.down(x))


def adapted(model: Llama, rank: int) -> Llama:
    """The same model, frozen, with an adapter at every linear layer of its blocks."""
    model.requires_grad_(False)
    for block in model.layers:
        for parent in (block, block.attention):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(parent, name, Adapted(child, rank))
    return model
