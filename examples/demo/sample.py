"""Let a trained GPT write."""

from __future__ import annotations

import torch
import torch.distributed as dist

from gpt import GPT


@torch.no_grad()
def sample(model: GPT, prompt: bytes, *, length: int, device: torch.device, temperature: float = 0.7) -> str:
    """`prompt` and `length` more bytes. A collective call: every rank runs the model, rank 0 throws the dice.

    The input always has the full context (padded on the right, which causal attention does not see), so that one
    compiled program serves every length.
    """
    context = model.config.context
    generator = torch.Generator(device).manual_seed(0)
    ids = torch.tensor(list(prompt), device=device)
    was_training = model.training
    model.eval()
    for _ in range(length):
        seen = ids[-context:]
        window = torch.nn.functional.pad(seen, (0, context - len(seen)))[None]
        logits = model(window)[0, len(seen) - 1]
        choice = torch.multinomial((logits / temperature).softmax(0), 1, generator=generator)
        if dist.is_initialized():
            dist.broadcast(choice, src=0)
        ids = torch.cat((ids, choice))
    model.train(was_training)
    return bytes(ids.tolist()).decode("utf-8", errors="replace")
