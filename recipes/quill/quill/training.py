"""The training loop: a wall-clock budget, Muon and AdamW, next-token loss or distillation from a teacher.

Knows nothing about what the tokens mean.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quill.corpus import IGNORED, Batch
from quill.model import Llama, document_mask
from quill.muon import Muon

WARM_UP_STEPS = 100


@dataclass(frozen=True)
class Rates:
    """Peak learning rates, and the part of the budget after which they fall linearly to zero."""

    matrices: float = 0.02
    embeddings: float = 0.004
    others: float = 0.004
    decay_from: float = 0.35

    def scale(self, step: int, progress: float) -> float:
        """``progress`` is the part of the budget already spent, 0 to 1."""
        return min(1.0, (step + 1) / WARM_UP_STEPS, max(0.0, (1 - progress) / (1 - self.decay_from)))


@dataclass(frozen=True)
class Trained:
    steps: int
    tokens: int
    seconds: float
    loss: float


def train(model: Llama, stream: Iterator[Batch], seconds: float, rates: Rates, teacher: Llama | None = None) -> Trained:
    """Trains until the budget is spent; the clock starts when compilation is done."""
    device = next(model.parameters()).device
    if device.type == "cuda":
        for layer in model.model.layers:
            layer.compile()
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    muon = Muon(matrices)
    adam = _adam(model, rates)
    tokens = step = 0
    loss = torch.zeros((), device=device)
    started = shown = time.monotonic()
    while (elapsed := time.monotonic() - started) < seconds:
        scale = rates.scale(step, elapsed / seconds)
        batch = next(stream)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = loss_of(model, batch, teacher)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in adam.param_groups:
            group["lr"] = group["peak"] * scale
        adam.step()
        muon.step(rates.matrices * scale)
        adam.zero_grad()
        model.zero_grad()
        step, tokens = step + 1, tokens + batch.tokens.numel()
        if step == 2:
            loss.item()
            seconds -= time.monotonic() - started
            started = time.monotonic()
        if time.monotonic() - shown > 20:
            shown = time.monotonic()
            print(
                f"  {elapsed:5.0f} s  step {step:6d}  {tokens / 1e6:7.1f}M tokens  loss {loss.item():.4f}", flush=True
            )
    return Trained(step, tokens, time.monotonic() - started, loss.item())


def loss_of(model: Llama, batch: Batch, teacher: Llama | None = None) -> Tensor:
    """Over assistant tokens only: cross entropy, or the divergence from the teacher's distribution."""
    mask = document_mask(batch.documents)
    chosen = batch.targets != IGNORED
    logits = model.logits(model(batch.tokens, mask)[chosen]).float()  # [targets, vocabulary]
    if teacher is None:
        return F.cross_entropy(logits, batch.targets[chosen])
    with torch.no_grad():
        taught = teacher.logits(teacher(batch.tokens, mask)[chosen]).float()
    return F.kl_div(logits.log_softmax(-1), taught.log_softmax(-1), reduction="batchmean", log_target=True)


def _adam(model: Llama, rates: Rates) -> torch.optim.AdamW:
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": [model.model.embed_tokens.weight], "peak": rates.embeddings, "weight_decay": 0.0},
        {"params": vectors, "peak": rates.others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=next(model.parameters()).is_cuda)
