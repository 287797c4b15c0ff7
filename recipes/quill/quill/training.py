"""Training of Quill and its draft model: next-token loss, or distillation from a teacher."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from quill.corpus import IGNORED, Batch
from quill.model import Llama, document_mask
from quill.training_loop import Optimizers, Rates, Trained, compile_layers, run


def train(model: Llama, stream: Iterator[Batch], seconds: float, rates: Rates, teacher: Llama | None = None) -> Trained:
    """Trains until the budget is spent; see `run`."""

    def loss(batch: Batch) -> tuple[Tensor, tuple[()]]:
        with torch.autocast(batch.tokens.device.type, torch.bfloat16, enabled=batch.tokens.is_cuda):
            return loss_of(model, batch, teacher), ()

    compile_layers(model)
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    optimizers = Optimizers(model, matrices, model.model.embed_tokens.weight, rates)
    return run(optimizers, loss, stream, seconds, rates)


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
