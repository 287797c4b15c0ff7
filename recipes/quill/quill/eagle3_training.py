"""The training loop of an EAGLE-3 head: a wall-clock budget, Muon and AdamW, as for the models."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from quill.corpus import Batch
from quill.eagle3 import DRAFTS, Head, loss_of, taught
from quill.model import Llama
from quill.muon import Muon
from quill.training import Rates, Trained


def train_head(
    head: Head, model: Llama, stream: Iterator[Batch], seconds: float, rates: Rates, most_steps: int = 0
) -> Trained:
    """Trains the head on what the model computes until the budget is spent, or `most_steps` are done, if there are any.

    The clock starts when compilation is done.
    """
    device = next(head.parameters()).device
    if device.type == "cuda":
        for layer in model.model.layers:
            layer.compile()
    muon = Muon([head.fc.weight, *(p for p in head.midlayer.parameters() if p.ndim == 2)])
    vectors = [p for p in head.parameters() if p.ndim < 2]
    groups = [
        {"params": [head.lm_head.weight], "peak": rates.embeddings, "weight_decay": 0.0},
        {"params": vectors, "peak": rates.others, "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=device.type == "cuda")
    tokens = step = 0
    loss = torch.zeros((), device=device)
    started = shown = time.monotonic()
    while (elapsed := time.monotonic() - started) < seconds and (not most_steps or step < most_steps):
        progress = step / most_steps if most_steps else elapsed / seconds
        scale = rates.scale(step, max(progress, elapsed / seconds))
        batch = next(stream)
        loss, agreed = _step(head, model, batch)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        for group in adam.param_groups:
            group["lr"] = group["peak"] * scale
        adam.step()
        muon.step(rates.matrices * scale)
        head.zero_grad()
        step, tokens = step + 1, tokens + batch.tokens.numel()
        if step == 2 and device.type == "cuda":
            loss.item()
            seconds -= time.monotonic() - started
            started = time.monotonic()
        if time.monotonic() - shown > 20:
            shown = time.monotonic()
            rate = ", ".join(f"{value:.3f}" for value in agreed.tolist())
            print(
                f"  {elapsed:5.0f} s  step {step:6d}  {tokens / 1e6:7.1f}M tokens  loss {loss.item():.4f}  {rate}",
                flush=True,
            )
    return Trained(step, tokens, time.monotonic() - started, loss.item())


def agreement(head: Head, model: Llama, stream: Iterator[Batch], batches: int, drafts: int) -> list[float]:
    """By draft, how often it and all before it are the model's most likely tokens, 0 to 1."""
    rates: list[Tensor] = []
    with torch.no_grad():
        for _ in range(batches):
            rates.append(_step(head, model, next(stream), drafts)[1])
    mean: list[float] = torch.stack(rates).mean(0).tolist()
    return mean


def _step(head: Head, model: Llama, batch: Batch, drafts: int = DRAFTS) -> tuple[Tensor, Tensor]:
    with torch.autocast(batch.tokens.device.type, torch.bfloat16, enabled=batch.tokens.is_cuda):
        return loss_of(head, model, batch, taught(model, head, batch), drafts)
