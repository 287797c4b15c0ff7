"""One step: a Plan to a batch, hidden states, logits of the positions that are read, tokens, and a Result."""

from __future__ import annotations

import time

import numpy as np
import torch
from torch import Tensor

from quire.attention.backend import AttentionBackend
from quire.messages import Plan, Result, TokenLogprobs
from quire.models.model import Model
from quire.worker.batch import Batch, BatchBuffers
from quire.worker.logprobs import RawLogprobs
from quire.worker.sampler import sample
from quire.worker.slots import NO_LOGPROBS, SlotTable
from quire.worker.transfer import BlockTransfer

UNSOUND = "The model's output was not a number; this happens with broken weights or an overflow of the dtype."


class Runner:
    """Executes plans in order. The slot table is the only thing that lives from one step to the next."""

    def __init__(
        self,
        model: Model,
        attention: AttentionBackend,
        transfer: BlockTransfer,
        slots: SlotTable,
        batches: BatchBuffers,
    ) -> None:
        self._model = model
        self._transfer = transfer
        self._attention = attention
        self._slots = slots
        self._batches = batches

    def execute(self, plan: Plan) -> Result:
        """Apply the plan's differences, move its rows forward, draw its reads."""
        began = time.perf_counter()
        with torch.inference_mode():
            self._slots.apply(plan)
            self._transfer.apply(plan)
            if not plan.slots:
                return Result(plan.step, [], [])
            batch = self._batches.fill(plan)
            self._attention.prepare(batch.rows)
            hidden = self._model.hidden(batch.tokens, batch.rows.positions, self._attention)
            if not plan.reads:
                return Result(plan.step, [], [], device_ms=_ms_since(began))
            tokens, sound, logprobs = self._read(batch, hidden)
            return _result(plan.step, tokens, sound, logprobs, _ms_since(began))

    def _read(self, batch: Batch, hidden: Tensor) -> tuple[Tensor, Tensor, list[TokenLogprobs | None]]:
        """Draw a token for each read; its slot keeps it as the next step's input."""
        if len(batch.read_tokens) < len(hidden):
            hidden = hidden.index_select(0, torch.from_numpy(batch.read_tokens).to(hidden.device))
        logits = self._model.logits(hidden)
        wanted = self._slots.host.logprobs[batch.read_slots]
        raw = RawLogprobs(logits, wanted) if (wanted != NO_LOGPROBS).any() else None
        tokens, sound = sample(logits, batch.read_slots, self._slots)
        where = torch.from_numpy(batch.read_slots).to(hidden.device)
        self._slots.last.index_copy_(0, where, tokens)
        self._slots.drawn.index_add_(0, where, torch.ones_like(where))
        return tokens, sound, [] if raw is None else raw.of(tokens)


def _result(step: int, tokens: Tensor, sound: Tensor, logprobs: list[TokenLogprobs | None], device_ms: float) -> Result:
    """The step's columns; reads without sound logits are errors and gain nothing."""
    drawn: list[int] = tokens.tolist()
    if bool(sound.all()):
        return Result(step, [1] * len(drawn), drawn, logprobs, [], device_ms)
    good = np.flatnonzero(sound.cpu().numpy()).tolist()
    errors = [(read, UNSOUND) for read in np.flatnonzero(~sound.cpu().numpy()).tolist()]
    counts = sound.to(torch.int64).tolist()
    kept = [logprobs[read] for read in good] if logprobs else []
    return Result(step, counts, [drawn[read] for read in good], kept, errors, device_ms)


def _ms_since(began: float) -> float:
    return (time.perf_counter() - began) * 1e3
