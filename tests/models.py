"""Models: what people train, small. Each takes ids and labels [batch, time] and ends in a loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.attention.flex_attention as flex
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
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


# What the library ships, small; configurations are its defaults otherwise, but for dropout


def qwen3() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    size = {"vocab_size": VOCABULARY, "hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 2}
    return Qwen3ForCausalLM(Qwen3Config(**size, num_attention_heads=2, num_key_value_heads=1, head_dim=6))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    size = {"vocab_size": VOCABULARY, "n_embd": 12, "n_layer": 2, "n_head": 2, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(**size, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    size = {"vocab_size": VOCABULARY, "hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 2}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForMaskedLM(BertConfig(**size, **dropout, num_attention_heads=2, max_position_embeddings=16))


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    size = {"vocab_size": VOCABULARY, "d_model": 12, "d_kv": 6, "d_ff": 20, "num_layers": 2, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(**size, dropout_rate=0.0, decoder_start_token_id=0))


def whisper() -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    size = {"vocab_size": VOCABULARY, "d_model": 12, "encoder_layers": 1, "decoder_layers": 1, "num_mel_bins": 4}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 20, "decoder_ffn_dim": 20}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    length = {"max_source_positions": 4, "max_target_positions": 8}
    rest = {"begin_suppress_tokens": None, "suppress_tokens": None}
    return WhisperForConditionalGeneration(WhisperConfig(**size, **heads, **tokens, **length, **rest, dropout=0.0))


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    size = {"hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2}
    image = {"image_size": 8, "patch_size": 4, "num_labels": VOCABULARY}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return ViTForImageClassification(ViTConfig(**size, **image, **dropout))


def mixtral() -> nn.Module:
    """Experts behind a router: every expert is computed where the shapes have to be static."""
    from transformers import MixtralConfig, MixtralForCausalLM

    size = {"vocab_size": VOCABULARY, "hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return MixtralForCausalLM(MixtralConfig(**size, **heads, num_local_experts=3))


def noise(ids: Tensor, *shape: int) -> Tensor:
    """An input that is not tokens, different for other ids."""
    seed = int((ids.flatten() * torch.arange(1, ids.numel() + 1)).sum())
    return torch.randn(len(ids), *shape, generator=torch.Generator().manual_seed(seed))


def on_images(model: nn.Module, step: int, ids: Tensor, labels: Tensor) -> Tensor:
    return model(pixel_values=noise(ids, 3, 8, 8), labels=labels[:, 0]).loss


def on_sound(model: nn.Module, step: int, ids: Tensor, labels: Tensor) -> Tensor:
    return model(input_features=noise(ids, 4, 8), labels=labels).loss


def masked(model: nn.Module, step: int, ids: Tensor, labels: Tensor) -> Tensor:
    mask = torch.ones_like(ids)
    mask[0, -1] = 0
    return model(ids, attention_mask=mask, labels=labels).loss


class Transformer(nn.Module):
    """torch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.transformer = nn.Transformer(8, 2, 1, 1, 12, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        x = self.transformer(self.embed(ids), self.embed(ids), tgt_mask=mask, tgt_is_causal=True)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 6, 3, padding=1)
        self.norm = nn.GroupNorm(2, 6)
        self.deep = nn.Conv2d(6, 10, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(10, 6, 2, stride=2)
        self.out = nn.Conv2d(12, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        near = F.silu(self.norm(self.down(x)))
        far = self.up(F.silu(self.deep(near)))
        return self.out(torch.cat([near, far], dim=1))


def to_noise(model: nn.Module, step: int, ids: Tensor, labels: Tensor) -> Tensor:
    return (model(noise(ids, 3, 8, 8)) - noise(labels, 3, 8, 8)).square().mean()


class ConvNet(nn.Sequential):
    """Batch statistics in two dims, pooling, and a class of torch's own as the whole model."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 5, 3, padding=1, bias=False),
            nn.BatchNorm2d(5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(5, 7, 3, bias=False),
            nn.BatchNorm2d(7),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(7, VOCABULARY),
        )


def classify(model: nn.Module, step: int, ids: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(noise(ids, 3, 8, 8)), labels[:, 0])


class Parametrized(nn.Module):
    """Weights behind weight norm and spectral norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 6)
        self.mix = weight_norm(nn.Linear(6, 7))
        self.head = spectral_norm(nn.Linear(7, VOCABULARY))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(torch.tanh(self.mix(self.embed(ids)))).flatten(0, 1), labels.flatten())


class Twice(nn.Module):
    """One block called twice, a second loss, a running mean and a count of calls, and outputs of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 6)
        self.block = nn.Linear(6, 6)
        self.head = nn.Linear(6, VOCABULARY)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("average", torch.zeros(6))

    def forward(self, ids: Tensor, *, labels: Tensor) -> dict[str, Any]:
        x = self.embed(ids)
        for _ in range(2):
            x = x + torch.tanh(self.block(x))
        self.calls += 1
        self.average.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
        losses = [F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()), x.square().mean()]
        return {
            "losses": losses,
            "ids": ids,
            "view": ids.flatten()[:3],
            "last": (x[:, -1], self.calls + 0),
            "none": None,
        }


def two_losses(model: nn.Module, step: int, ids: Tensor, labels: Tensor) -> Tensor:
    out = model(ids, labels=labels)
    assert out["ids"] is ids
    assert torch.equal(out["view"], ids.flatten()[:3])
    assert int(out["last"][1]) == int(model.calls)
    return out["losses"][0] + 0.1 * out["losses"][1] + out["last"][0].abs().mean()


class Branching(nn.Module):
    """Control flow on values as operators of higher order: two branches with weights of their own, and a map."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 6)
        self.up, self.down = nn.Linear(6, 6), nn.Linear(6, 6)
        self.head = nn.Linear(6, VOCABULARY)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        x = torch.cond(x.sum() > 0, lambda x: torch.tanh(self.up(x)), lambda x: torch.sin(self.down(x)), (x,))
        logits = torch.func.vmap(self.head)(x)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Selecting(nn.Module):
    """Sizes that depend on values."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 6)
        self.head = nn.Linear(6, VOCABULARY)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        chosen = labels > 3
        return F.cross_entropy(self.head(torch.tanh(self.embed(ids[chosen]))), labels[chosen], reduction="sum")


class Adapter(nn.Module):
    """LoRA: a frozen weight and a small product beside it."""

    def __init__(self, frozen: nn.Linear, rank: int = 2):
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, frozen.in_features) / rank)
        self.b = nn.Parameter(torch.randn(frozen.out_features, rank) / rank)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + x @ self.a.t() @ self.b.t()


def adapted() -> nn.Module:
    """Only the adapters of attention are trained."""
    model = gpt().requires_grad_(False)
    for block in model.blocks:
        block.attention.qkv = Adapter(block.attention.qkv)
        block.attention.out = Adapter(block.attention.out)
    return model


def with_peft() -> nn.Module:
    """The library's LoRA around the library's Llama."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))


class MixedDtypes(nn.Module):
    """Trained in two dtypes, with parameters that only some steps use."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 6)
        self.wide = nn.Linear(6, 5, dtype=torch.float64)
        self.sometimes = nn.Linear(5, 5)
        self.head = nn.Linear(5, VOCABULARY)

    def forward(self, ids: Tensor, labels: Tensor, use: bool) -> Tensor:
        x = torch.tanh(self.wide(self.embed(ids).double())).float()
        x = self.sometimes(x) if use else x
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def now_and_then(model: nn.Module, step: int, ids: Tensor, labels: Tensor) -> Tensor:
    return model(ids, labels, use=step != 0)


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


class Flexible(nn.Module):
    """flex_attention with a mask of blocks and a learned slope, which the body of the op captures; with heads as wide
    as a GPU needs them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 32)
        self.qkv = nn.Linear(32, 96)
        self.slope = nn.Parameter(torch.tensor([0.5, 0.25]))
        self.head = nn.Linear(32, VOCABULARY)
        self.mask = flex.create_block_mask(lambda b, h, i, j: i >= j, None, None, 4, 4, device="cpu")

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        q, k, v = self.qkv(self.embed(ids)).unflatten(-1, (3, 2, 16)).transpose(1, 3).unbind(2)
        y = flex.flex_attention(q, k, v, lambda s, b, h, i, j: s + self.slope[h] * (j - i), self.mask.to(ids.device))
        return F.cross_entropy(self.head(y.transpose(1, 2).flatten(-2)).flatten(0, 1), labels.flatten())


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
    "qwen3": (qwen3, as_transformers),
    "gpt2": (gpt2, as_transformers),
    "bert": (bert, masked),
    "t5": (t5, as_transformers),
    "whisper": (whisper, on_sound),
    "vit": (vit, on_images),
    "mixtral": (mixtral, as_transformers),
    "nn.Transformer": (Transformer, plain),
    "conv net": (ConvNet, classify),
    "u-net": (UNet, to_noise),
    "parametrized": (Parametrized, plain),
    "called twice": (Twice, two_losses),
    "branching": (Branching, plain),
    "selecting": (Selecting, plain),
    "flex attention": (Flexible, plain),
    "lora": (adapted, plain),
    "peft": (with_peft, as_transformers),
    "mixed dtypes": (MixedDtypes, now_and_then),
}
NOT_COMPILED = {"flex attention"}
"""Where there is no GPU: Inductor has no backward of it for CPUs. (That torch refuses it there is switched off.)"""
flex._validate_device = lambda query, key, value: None
