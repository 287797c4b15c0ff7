"""One step: a Plan to a batch, hidden states, logits of the positions that are read, tokens, and a Result."""

from __future__ import annotations

import time
from typing import get_args

import torch
from torch import Tensor

from quire.attention.backend import AttentionBackend
from quire.errors import ConfigError
from quire.messages import Plan, Result, TokenLogprobs
from quire.models.model import Model
from quire.worker.batch import Batch, BatchBuffers
from quire.worker.logprobs import LogprobsMode
from quire.worker.prompt_logprobs import PromptLogprobs
from quire.worker.sampler import Drawn, sample
from quire.worker.slots import SlotTable
from quire.worker.transfer import BlockTransfer


class Runner:
    """Executes plans in order. The slot table is the only thing that lives from one step to the next."""

    def __init__(
        self,
        model: Model,
        attention: AttentionBackend,
        transfer: BlockTransfer,
        slots: SlotTable,
        batches: BatchBuffers,
        logprobs_mode: LogprobsMode = "raw_logprobs",
    ) -> None:
        if logprobs_mode not in get_args(LogprobsMode):
            modes = ", ".join(get_args(LogprobsMode))
            raise ConfigError(f"--logprobs-mode {logprobs_mode} is not one of {modes}.", param="logprobs_mode")
        self._model = model
        self._transfer = transfer
        self._attention = attention
        self._slots = slots
        self._batches = batches
        self._logprobs_mode: LogprobsMode = logprobs_mode
        self._prompt_logprobs = PromptLogprobs(model, slots.vocab_size)

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
            hidden = self._model.hidden(batch.tokens, batch.positions, self._attention)
            of_prompts = self._look_at_prompts(plan, batch, hidden) if plan.scored else []
            if not plan.reads:
                return Result(plan.step, [], [], device_ms=_ms_since(began), prompt_logprobs=of_prompts)
            drawn, logprobs = self._read(batch, hidden)
            return _result(plan.step, drawn, logprobs, began, of_prompts)

    def _read(self, batch: Batch, hidden: Tensor) -> tuple[Drawn, list[TokenLogprobs | None]]:
        """Draw a token for each read; its slot keeps it as the next step's input."""
        if len(batch.read_tokens) < len(hidden):
            hidden = hidden.index_select(0, torch.from_numpy(batch.read_tokens).to(hidden.device))
        logits = self._model.logits(hidden)
        reports = self._slots.host.reports(batch.read_slots, self._logprobs_mode)
        if reports and not reports.processed:
            reports.see(logits)
        drawn = sample(logits, batch.read_slots, self._slots, keep_scores=bool(reports) and reports.processed)
        if drawn.scores is not None:
            reports.see(drawn.scores)
        where = torch.from_numpy(batch.read_slots).to(hidden.device)
        self._slots.last.index_copy_(0, where, drawn.tokens)
        self._slots.drawn.index_add_(0, where, torch.ones_like(where))
        return drawn, reports.of(drawn.tokens) if reports else []

    def _look_at_prompts(self, plan: Plan, batch: Batch, hidden: Tensor) -> list[list[TokenLogprobs]]:
        wanted = [self._slots.host.prompt_logprobs[plan.slots[scored.row]] for scored in plan.scored]
        return self._prompt_logprobs.of(plan, batch, hidden, wanted)


def _result(
    step: int,
    drawn: Drawn,
    logprobs: list[TokenLogprobs | None],
    began: float,
    of_prompts: list[list[TokenLogprobs]],
) -> Result:
    """The step's columns; reads that failed are errors and gain nothing."""
    tokens: list[int] = drawn.tokens.tolist()
    counts = [1] * len(tokens)
    errors = drawn.errors()
    if errors:
        good = [read for read in range(len(tokens)) if read not in errors]
        counts = [int(read not in errors) for read in range(len(tokens))]
        tokens = [tokens[read] for read in good]
        logprobs = [logprobs[read] for read in good] if logprobs else []
    return Result(step, counts, tokens, logprobs, list(errors.items()), _ms_since(began), of_prompts)


def _ms_since(began: float) -> float:
    return (time.perf_counter() - began) * 1e3
