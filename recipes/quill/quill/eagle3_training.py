"""Training of an EAGLE-3 head on what its model computes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from quill.corpus import Batch
from quill.eagle3 import DRAFTS, Head, loss_of, taught
from quill.model import Llama
from quill.training_loop import Optimizers, Rates, Trained, compile_layers, run


def train_head(
    head: Head, model: Llama, stream: Iterator[Batch], seconds: float, rates: Rates, max_steps: int = 0
) -> Trained:
    """Trains until the budget is spent, or `max_steps` are done, if there are any; see `run`."""

    def loss(batch: Batch) -> tuple[Tensor, tuple[Tensor, ...]]:
        found, agreed = _loss_and_agreement(head, model, batch)
        return found, agreed.unbind()

    compile_layers(model)
    matrices = [head.fc.weight, *(p for p in head.midlayer.parameters() if p.ndim == 2)]
    optimizers = Optimizers(head, matrices, head.lm_head.weight, rates)
    return run(optimizers, loss, stream, seconds, rates, max_steps)


def agreement(head: Head, model: Llama, stream: Iterator[Batch], batches: int, drafts: int) -> list[float]:
    """By draft, how often it and all before it are the model's most likely tokens, 0 to 1."""
    rates: list[Tensor] = []
    with torch.no_grad():
        for _ in range(batches):
            rates.append(_loss_and_agreement(head, model, next(stream), drafts)[1])
    mean: list[float] = torch.stack(rates).mean(0).tolist()
    return mean


def _loss_and_agreement(head: Head, model: Llama, batch: Batch, drafts: int = DRAFTS) -> tuple[Tensor, Tensor]:
    with torch.autocast(batch.tokens.device.type, torch.bfloat16, enabled=batch.tokens.is_cuda):
        return loss_of(head, model, batch, taught(model, head, batch), drafts)
