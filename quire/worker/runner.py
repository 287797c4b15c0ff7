"""One step: a Plan to a batch, hidden states, logits of the positions that are read, tokens, and a Result.

On a GPU a step is only launched; its outputs come back to the host on their own, and nothing waits for the device but
`Flight.result`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import get_args

import torch
from torch import Tensor

from quire.attention.backend import AttentionBackend
from quire.errors import ConfigError
from quire.messages import Plan, Result, TokenLogprobs
from quire.models.model import Model
from quire.worker.batch import Batch, BatchBuffers, HostBatch
from quire.worker.columns import Column, StepColumns
from quire.worker.flight import Flight, HostCopies, HostWatch, StreamWatch, Watch
from quire.worker.graphs import DecodeGraphs
from quire.worker.logprobs import LogprobsMode
from quire.worker.prompt_logprobs import PromptLogprobs, PromptScores
from quire.worker.sampler import rehearse, sample
from quire.worker.slots import SlotTable
from quire.worker.transfer import BlockTransfer

_NOTHING = Plan(0, [], [], [], [], [], [], [], [], [], [])
_COLUMNS = 6
"""Entries of a row and of a token in a step's columns, at least; longer columns are copied one by one."""


@dataclass(frozen=True)
class LargestStep:
    """What a runner's buffers are made for.

    Attributes:
        rows: Most rows of a step.
        tokens: Most tokens of a step.
        length: Of the longest sequence.
    """

    rows: int
    tokens: int
    length: int

    def rows_of(self, tokens: int) -> list[int]:
        """So many tokens, or as many as a step may have, in as few rows as can be: the tokens of each."""
        whole, rest = divmod(min(tokens, self.tokens, self.rows * self.length), self.length)
        return [self.length] * whole + [rest] * bool(rest)


class Runner:
    """Launches plans in order. The slot table is the only thing that lives from one step to the next.

    Args:
        model: With its weights.
        attention: Over the KV cache.
        transfer: Of its blocks.
        slots: The slot table.
        largest: See LargestStep.
        by_length: Whether the model asks how long sequences count as.
        logprobs_mode: What is reported of drawn tokens.
    """

    def __init__(
        self,
        model: Model,
        attention: AttentionBackend,
        transfer: BlockTransfer,
        slots: SlotTable,
        largest: LargestStep,
        by_length: bool = False,
        logprobs_mode: LogprobsMode = "raw_logprobs",
    ) -> None:
        if logprobs_mode not in get_args(LogprobsMode):
            modes = ", ".join(get_args(LogprobsMode))
            raise ConfigError(f"--logprobs-mode {logprobs_mode} is not one of {modes}.", param="logprobs_mode")
        self._model = model
        self._transfer = transfer
        self._attention = attention
        self._slots = slots
        self._logprobs_mode: LogprobsMode = logprobs_mode
        self._prompt_logprobs = PromptLogprobs(model, slots.vocab_size)
        self._batches = BatchBuffers(slots, largest.rows, largest.tokens, by_length)
        self._columns = StepColumns(_COLUMNS * (largest.rows + largest.tokens), slots.device)
        self._graphs = DecodeGraphs(())
        on_gpu = slots.device.type != "cpu"
        self._largest = largest
        self._copies = HostCopies(largest.rows, (torch.int64, torch.int8)) if on_gpu else None

    # --- start ------------------------------------------------------------------------------------------------------

    def run_largest(self) -> None:
        """What takes most memory, on rows of the dummy: the most tokens, as many reads as there are rows; and steps of
        a token a row, which may run kernels of their own.
        """
        self.run_dummies(self._largest.rows_of(self._largest.tokens))
        for size in {1, self._largest.rows}:
            self.run_dummies([1] * size)

    def record(self, sizes: Sequence[int]) -> None:
        """Record graphs of decode steps of so many rows."""
        graphs = DecodeGraphs(sizes)
        with torch.inference_mode():
            for size in reversed(sizes):
                host = HostBatch.of_dummy(self._slots.dummy, [1] * size)
                forward = partial(self._decode, host, self._lay(_NOTHING, host))
                forward()  # compiles what is not compiled yet
                graphs.record(size, forward)
        self._graphs = graphs

    def _decode(self, host: HostBatch, laid: _Laid) -> Tensor:
        """[rows, vocab] logits of a step in which all rows move by one token."""
        return self._model.logits(self._forward(host, laid)[1])

    def run_dummies(self, counts: Sequence[int], *, draw: bool = True) -> None:
        """A step of rows of the dummy with so many tokens each, logits for the most reads and positions of prompts that
        it could have, and all that may be drawn and reported for them.
        """
        rows, positions = self._largest.rows, self._prompt_logprobs.positions
        with torch.inference_mode():
            host = HostBatch.of_dummy(self._slots.dummy, counts)
            _, hidden = self._forward(host, self._lay(_NOTHING, host))
            logits = self._model.logits(hidden[: max(rows, positions)].clone())  # reads are gathered from the tokens
            if draw:
                rehearse(logits[:rows], self._slots, self._logprobs_mode)

    # --- steps ------------------------------------------------------------------------------------------------------

    def launch(self, plan: Plan) -> Flight:
        """Apply the plan's differences, move its rows forward, draw its reads."""
        watch = StreamWatch(self._copies) if self._copies else HostWatch()
        with torch.inference_mode():
            self._slots.admit(plan.admitted)
            host = HostBatch.of(plan, self._slots.host.bounds) if plan.slots else None
            recorded = host is not None and host.is_decode and not plan.scored and self._graphs.fit(len(host.slots))
            if host is not None and recorded:
                host = host.padded(self._graphs.padded(len(host.slots)), self._slots.dummy)
            laid = self._lay(plan, host)
            self._slots.apply(plan, laid.slots)
            self._transfer.apply(plan, laid.transfer)
            if host is None:
                return watch.flight(lambda ms: Result(plan.step, [], [], device_ms=ms))
            if recorded:
                logits = self._graphs.replay(len(host.slots))[: len(host.read_slots)]
                return self._draw(plan, host, laid, logits, PromptScores(), watch)
            batch, hidden = self._forward(host, laid)
            of_prompts = self._look_at_prompts(plan, host, batch, hidden) if plan.scored else PromptScores()
            if not plan.reads:
                return watch.flight(
                    lambda ms: Result(plan.step, [], [], device_ms=ms, prompt_logprobs=of_prompts.collect())
                )
            logits = self._model.logits(_of_reads(hidden, laid.reads[0]))
            return self._draw(plan, host, laid, logits, of_prompts, watch)

    def _lay(self, plan: Plan, host: HostBatch | None) -> _Laid:
        """Everything that the step takes from the host, on the device by one copy."""
        rows: tuple[Column, ...] = ()
        attention: tuple[Column, ...] = ()
        reads: tuple[Column, ...] = ()
        if host is not None:
            rows, attention = host.columns(), self._attention.columns(host.counts, host.bounds)
            reads = (host.read_tokens, host.read_slots)
        parts = (rows, attention, reads, self._slots.columns(plan), self._transfer.columns(plan))
        laid = iter(self._columns.lay([column for part in parts for column in part]))
        return _Laid(*(tuple(itertools.islice(laid, len(part))) for part in parts))

    def _forward(self, host: HostBatch, laid: _Laid) -> tuple[Batch, Tensor]:
        """The step's batch and its hidden states, [tokens, hidden]."""
        batch = self._batches.begin(host, laid.rows, laid.attention)
        self._attention.prepare(batch.rows)
        return batch, self._model.hidden(batch.tokens, batch.positions, self._attention)

    def _look_at_prompts(self, plan: Plan, host: HostBatch, batch: Batch, hidden: Tensor) -> PromptScores:
        wanted = [self._slots.host.prompt_logprobs[plan.slots[scored.row]] for scored in plan.scored]
        return self._prompt_logprobs.launch(plan, host, batch, hidden, wanted)

    def _draw(
        self,
        plan: Plan,
        host: HostBatch,
        laid: _Laid,
        logits: Tensor,
        of_prompts: PromptScores,
        watch: Watch,
    ) -> Flight:
        """Draw a token for each read; its slot keeps it as the next step's input."""
        reports = self._slots.host.reports(host.read_slots, self._logprobs_mode)
        where = laid.reads[1]
        keep = bool(reports) and reports.processed
        drawn = sample(logits, host.read_slots, self._slots, keep_scores=keep, where=where)
        seen = logits if drawn.scores is None else drawn.scores
        reported = reports.launch(seen, drawn.tokens).to_host() if reports else None
        self._slots.last.index_copy_(0, where, drawn.tokens)
        self._slots.drawn.index_add_(0, where, torch.ones_like(where))
        tokens, faults = watch.to_host((drawn.tokens, drawn.faults))

        def finish(device_ms: float) -> Result:
            logprobs = reports.collect(reported) if reported else []
            return _result(plan.step, tokens.tolist(), drawn.errors(faults), logprobs, of_prompts.collect(), device_ms)

        return watch.flight(finish)


@dataclass(frozen=True)
class _Laid:
    """A step's columns on the device, by who asked for them."""

    rows: tuple[Tensor, ...] = ()
    attention: tuple[Tensor, ...] = ()
    reads: tuple[Tensor, ...] = ()
    slots: tuple[Tensor, ...] = ()
    transfer: tuple[Tensor, ...] = ()


def _of_reads(hidden: Tensor, read_tokens: Tensor) -> Tensor:
    """[reads, hidden] the hidden states of the positions that are read."""
    return hidden if len(read_tokens) == len(hidden) else hidden.index_select(0, read_tokens)


def _result(
    step: int,
    tokens: list[int],
    errors: Mapping[int, str],
    logprobs: list[TokenLogprobs | None],
    of_prompts: list[list[TokenLogprobs]],
    device_ms: float,
) -> Result:
    """The step's columns; reads that failed are errors and gain nothing."""
    counts = [1] * len(tokens)
    if errors:
        good = [read for read in range(len(tokens)) if read not in errors]
        counts = [int(read not in errors) for read in range(len(tokens))]
        tokens = [tokens[read] for read in good]
        logprobs = [logprobs[read] for read in good] if logprobs else []
    return Result(step, counts, tokens, logprobs, list(errors.items()), device_ms, of_prompts)
