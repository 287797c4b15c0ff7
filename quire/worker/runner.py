"""One step: a Plan to a batch, hidden states, logits of the positions that are read, tokens, and a Result.

On a GPU a step is only launched; its outputs come back to the host on their own, and nothing waits for the device but
`Flight.result`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.attention.backend import AttentionBackend
from quire.errors import ConfigError
from quire.messages import Plan, Result, TokenLogprobs
from quire.models.model import Model
from quire.worker.batch import Batch, BatchBuffers, HostBatch
from quire.worker.columns import Column, StepColumns
from quire.worker.draw_outputs import DrawOutputs
from quire.worker.flight import Flight, Watch, Watches
from quire.worker.graphs import DecodeGraphs
from quire.worker.logprobs import LogprobsMode, Reports
from quire.worker.prompt_logprobs import PromptLogprobs, PromptScores
from quire.worker.sampler import Ints, draw_and_advance, errors_of, rehearse, sample
from quire.worker.slots import SlotTable
from quire.worker.transfer import BlockTransfer

_NOTHING = Plan(0, [], [], [], [], [], [], [], [], [], [])
Errors = Callable[[npt.NDArray[np.int8]], Mapping[int, str]]
"""From the faults of all reads to those that failed, and why."""
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
        self._drawn = DrawOutputs(largest.rows, slots.device)
        self._watches = Watches(slots.device)
        self._largest = largest

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
                step = partial(self._decode, host, self._lay(_NOTHING, host, (host.slots,)))
                step()  # compiles what is not compiled yet
                graphs.record(size, step)
        self._graphs = graphs

    def _decode(self, host: HostBatch, laid: _Laid) -> Tensor:
        """A step in which all rows move by one token, and what they draw without rules; [rows, vocab] logits."""
        logits = self._model.logits(self._forward(host, laid)[1])
        self._draw_plainly(logits, laid.reads[0])
        return logits

    def run_dummies(self, counts: Sequence[int], *, draw: bool = True) -> None:
        """A step of rows of the dummy with so many tokens each, logits for the most reads and positions of prompts that
        it could have, and all that may be drawn and reported for them.
        """
        rows, positions = self._largest.rows, self._prompt_logprobs.positions
        with torch.inference_mode():
            host = HostBatch.of_dummy(self._slots.dummy, counts)
            _, hidden = self._forward(host, self._lay(_NOTHING, host, ()))
            logits = self._model.logits(hidden[: max(rows, positions)].clone())  # reads are gathered from the tokens
            if draw:
                rehearse(logits[:rows], self._slots, self._logprobs_mode)

    # --- steps ------------------------------------------------------------------------------------------------------

    def launch(self, plan: Plan) -> Flight:
        """Apply the plan's differences, move its rows forward, draw its reads."""
        watch = self._watches.start()
        with torch.inference_mode():
            self._slots.admit(plan.admitted)
            if not plan.slots:
                self._apply(plan, self._lay(plan, None, ()))
                return watch.flight(lambda ms: Result(plan.step, [], [], device_ms=ms))
            host = HostBatch.of(plan, self._slots.host.bounds)
            recorded = host.is_decode and not plan.scored and self._graphs.fit(len(host.slots))
            return (self._replay if recorded else self._run)(plan, host, watch)

    def _replay(self, plan: Plan, host: HostBatch, watch: Watch) -> Flight:
        """A recorded step. It draws without rules in any case: where these are asked for, on behalf of the dummy."""
        dummy, reads = self._slots.dummy, self._reads_of(plan, host, watch)
        host = host.padded(self._graphs.padded(len(host.slots)), dummy)
        drawing = host.slots if reads.are_plain else np.full_like(host.slots, dummy)
        laid = self._lay(plan, host, (drawing, host.read_slots))
        self._apply(plan, laid)
        logits = self._graphs.replay(len(host.slots))
        if reads.are_plain:
            return self._finish(reads, logits)
        return self._draw_as_asked(reads, logits[: len(reads.slots)], laid.reads[1])

    def _run(self, plan: Plan, host: HostBatch, watch: Watch) -> Flight:
        """A step of any shape."""
        laid = self._lay(plan, host, (host.read_tokens, host.read_slots))
        self._apply(plan, laid)
        batch, hidden = self._forward(host, laid)
        of_prompts = self._look_at_prompts(plan, host, batch, hidden) if plan.scored else PromptScores()
        if not plan.reads:
            return watch.flight(
                lambda ms: Result(plan.step, [], [], device_ms=ms, prompt_logprobs=of_prompts.collect())
            )
        read_tokens, where = laid.reads
        logits = self._model.logits(_of_reads(hidden, read_tokens))
        reads = self._reads_of(plan, host, watch, of_prompts)
        if not reads.are_plain:
            return self._draw_as_asked(reads, logits, where)
        self._draw_plainly(logits, where)
        return self._finish(reads, logits)

    def _lay(self, plan: Plan, host: HostBatch | None, reads: tuple[Column, ...]) -> _Laid:
        """Everything that the step takes from the host, on the device by one copy."""
        rows: tuple[Column, ...] = ()
        attention: tuple[Column, ...] = ()
        if host is not None:
            rows, attention = host.columns(), self._attention.columns(host.counts, host.bounds)
        parts = (rows, attention, reads, self._slots.columns(plan), self._transfer.columns(plan))
        laid = iter(self._columns.lay([column for part in parts for column in part]))
        return _Laid(*(tuple(itertools.islice(laid, len(part))) for part in parts))

    def _apply(self, plan: Plan, laid: _Laid) -> None:
        """The plan's differences."""
        self._slots.apply(plan, laid.slots)
        self._transfer.apply(plan, laid.transfer)

    def _forward(self, host: HostBatch, laid: _Laid) -> tuple[Batch, Tensor]:
        """The step's batch and its hidden states, [tokens, hidden]."""
        batch = self._batches.begin(host, laid.rows, laid.attention)
        self._attention.prepare(batch.rows)
        return batch, self._model.hidden(batch.tokens, batch.positions, self._attention)

    def _look_at_prompts(self, plan: Plan, host: HostBatch, batch: Batch, hidden: Tensor) -> PromptScores:
        wanted = [self._slots.host.prompt_logprobs[plan.slots[scored.row]] for scored in plan.scored]
        return self._prompt_logprobs.launch(plan, host, batch, hidden, wanted)

    def _reads_of(self, plan: Plan, host: HostBatch, watch: Watch, of_prompts: PromptScores | None = None) -> _Reads:
        reports = self._slots.host.reports(host.read_slots, self._logprobs_mode)
        has_rules = bool(self._slots.rules.asking(host.read_slots))
        return _Reads(plan.step, host.read_slots, reports, has_rules, of_prompts or PromptScores(), watch)

    def _draw_plainly(self, logits: Tensor, where: Tensor) -> None:
        """Draw a token for each read by its slot's parameters alone; its slot keeps it as the next step's input."""
        reads = logits.shape[0]
        draw_and_advance(logits, where, self._slots, self._drawn.tokens[:reads], self._drawn.faults[:reads])

    def _draw_as_asked(self, reads: _Reads, logits: Tensor, where: Tensor) -> Flight:
        """The same by rules, or with the scores that tokens were drawn from."""
        drawn = sample(logits, reads.slots, self._slots, keep_scores=reads.see_scores, where=where)
        self._slots.last.index_copy_(0, where, drawn.tokens)
        self._slots.drawn.index_add_(0, where, torch.ones_like(where))
        number = len(reads.slots)
        self._drawn.tokens[:number].copy_(drawn.tokens)
        self._drawn.faults[:number].copy_(drawn.faults)
        return self._finish(reads, logits if drawn.scores is None else drawn.scores, drawn.errors)

    def _finish(self, reads: _Reads, seen: Tensor, errors: Errors = errors_of) -> Flight:
        """Bring to the host what was drawn, and what is reported of it by the logits that are to be seen."""
        reports, number = reads.reports, len(reads.slots)
        reported = reports.launch(seen, self._drawn.tokens[:number]).to_host() if reports else None
        tokens, faults = self._drawn.to_host()

        def finish(device_ms: float) -> Result:
            logprobs = [] if reported is None else reports.collect(reported)
            failed, of_prompts = errors(faults[:number]), reads.of_prompts.collect()
            return _result(reads.step, tokens[:number].tolist(), failed, logprobs, of_prompts, device_ms)

        return reads.watch.flight(finish)


@dataclass(frozen=True)
class _Reads:
    """A step that draws tokens, and what is wanted beside them.

    Attributes:
        step: Its number.
        slots: Of each read.
        reports: Log probabilities that are wanted.
        have_rules: Whether any of the reads' logits are changed.
        of_prompts: Log probabilities of prompts.
        watch: Over the step.
    """

    step: int
    slots: Ints
    reports: Reports
    have_rules: bool
    of_prompts: PromptScores
    watch: Watch

    @property
    def see_scores(self) -> bool:
        """Whether what is reported is what tokens are drawn from."""
        return bool(self.reports) and self.reports.processed

    @property
    def are_plain(self) -> bool:
        """Whether tokens are drawn by their slots' parameters alone, and nobody wants to see from what."""
        return not self.have_rules and not self.see_scores


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
