"""The training loop of the models and the head: a wall-clock budget, Muon and AdamW.

Knows nothing about what is trained, and on what loss.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quill.corpus import Batch
from quill.model import Llama
from quill.muon import Muon

WARM_UP_STEPS = 100
SHOWN_EVERY_S = 20


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


class Optimizers:
    """Muon for matrices, AdamW for the one that has a row for each token of the vocabulary, and for all vectors."""

    def __init__(
        self, module: nn.Module, matrices: Iterable[nn.Parameter], vocabulary: nn.Parameter, rates: Rates
    ) -> None:
        vectors = [p for p in module.parameters() if p.ndim < 2]
        groups = [
            {"params": [vocabulary], "peak": rates.embeddings, "weight_decay": 0.0},
            {"params": vectors, "peak": rates.others, "weight_decay": 0.0},
        ]
        self._module = module
        self._rate = rates.matrices
        self._muon = Muon(matrices)
        self._adam = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=vocabulary.is_cuda)

    def step(self, scale: float) -> None:
        """Against the gradients, which are zero then; ``scale`` is the part of the peak rates."""
        nn.utils.clip_grad_norm_(self._module.parameters(), 1.0)
        for group in self._adam.param_groups:
            group["lr"] = group["peak"] * scale
        self._adam.step()
        self._muon.step(self._rate * scale)
        self._module.zero_grad()


def run(
    optimizers: Optimizers,
    loss_of: Callable[[Batch], tuple[Tensor, Sequence[Tensor]]],
    stream: Iterator[Batch],
    seconds: float,
    rates: Rates,
    max_steps: int = 0,
) -> Trained:
    """Trains until the budget is spent, or `max_steps` are done, if there are any. The clock starts when compilation
    is done: rates fall over what the first two steps leave of the budget.

    ``loss_of`` also returns numbers that are shown beside the loss.
    """
    tokens = step = 0
    loss = torch.zeros(())
    started = shown = time.monotonic()
    while (elapsed := time.monotonic() - started) < seconds and (not max_steps or step < max_steps):
        progress = step / max_steps if max_steps else 0.0
        scale = rates.scale(step, max(progress, elapsed / seconds))
        batch = next(stream)
        loss, others = loss_of(batch)
        torch.autograd.backward(loss)
        optimizers.step(scale)
        step, tokens = step + 1, tokens + batch.tokens.numel()
        if step == 2:
            loss.item()
            seconds -= time.monotonic() - started
            started = time.monotonic()
        if time.monotonic() - shown > SHOWN_EVERY_S:
            shown = time.monotonic()
            numbers = "".join(f"  {value.item():.3f}" for value in others)
            print(
                f"  {elapsed:5.0f} s  step {step:6d}  {tokens / 1e6:7.1f}M tokens  loss {loss.item():.4f}{numbers}",
                flush=True,
            )
    return Trained(step, tokens, time.monotonic() - started, loss.item())


def compile_layers(model: Llama) -> None:
    """On a GPU."""
    if next(model.parameters()).is_cuda:
        for layer in model.model.layers:
            layer.compile()
