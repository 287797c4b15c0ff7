"""One step: a Plan to a batch, hidden states, logits of the positions that are read, tokens, and a Result.

On a GPU a step is only launched; its outputs come back to the host on their own, and nothing waits for the device but
`StepHandle.result`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import get_args

import numpy as np
import torch
from torch import Tensor

from quire.attention.backend import AttentionBackend, PaddedLimits
from quire.attention.metadata import AttentionMetadata
from quire.errors import ConfigError
from quire.messages import Plan, Result
from quire.models.model import Model
from quire.planning.step_limits import StepLimits
from quire.worker.batch import Batch, BatchBuffers, HostBatch
from quire.worker.buffer_ring import BufferRing
from quire.worker.cuda_graphs import CudaGraphs
from quire.worker.graph_shapes import MOST_ROWS, GraphShape, GraphShapes
from quire.worker.kv_transfer import BlockTransfer
from quire.worker.sampling.logprobs import LogprobsMode
from quire.worker.sampling.prompt_logprobs import PromptLogprobs, PromptScores
from quire.worker.sampling.sampler import Deferred, Ints
from quire.worker.sampling.step_sampler import StepSampler
from quire.worker.slot_table import SlotTable
from quire.worker.staging_buffer import Column, StagingBuffer, copied
from quire.worker.step_handle import StepHandle, StepTimer, StepTimers

_NOTHING = Plan(0, [], [], [], [], [], [], [], [], [], [])
_COLUMNS = 10
"""Entries of a row and of a token in a step's columns, at most, but for changes of tables and blocks: these are copied
one by one where they are too many.
"""


class ModelRunner:
    """Launches plans in order. The slot table is the only thing that lives from one step to the next.

    Args:
        model: With its weights.
        attention: Over the KV cache.
        transfer: Of its blocks.
        slots: The slot table.
        largest: What buffers are made for.
        by_length: Whether the model asks how long sequences count as.
        logprobs_mode: What is reported of drawn tokens.
        max_logprobs: How many tokens a request may have reported beside one; -1 for all.
    """

    def __init__(
        self,
        model: Model,
        attention: AttentionBackend,
        transfer: BlockTransfer,
        slots: SlotTable,
        largest: StepLimits,
        by_length: bool = False,
        logprobs_mode: LogprobsMode = "raw_logprobs",
        max_logprobs: int = 20,
    ) -> None:
        if logprobs_mode not in get_args(LogprobsMode):
            modes = ", ".join(get_args(LogprobsMode))
            raise ConfigError(f"--logprobs-mode {logprobs_mode} is not one of {modes}.", param="logprobs_mode")
        self._model = model
        self._transfer = transfer
        self._attention = attention
        self._slots = slots
        self._max_logprobs = slots.vocab_size if max_logprobs < 0 else min(max_logprobs, slots.vocab_size)
        self._prompt_logprobs = PromptLogprobs(model, slots.vocab_size)
        rows = max(largest.rows, MOST_ROWS)
        self._batches = BatchBuffers(slots, rows, largest.tokens, by_length)
        turns = BufferRing(slots.device)
        self._columns = StagingBuffer(_COLUMNS * (rows + largest.tokens), turns)
        self._shapes = GraphShapes(0, 0, 0, 0)
        self._graphs = CudaGraphs()
        self._draws = StepSampler(slots, largest.rows, logprobs_mode, turns)
        self._timers = StepTimers(slots.device)
        self._largest = largest

    # --- start ------------------------------------------------------------------------------------------------------

    def run_largest(self, deferred: Deferred = nullcontext) -> None:
        """What takes most memory, on rows of the dummy: the most tokens, as many reads as there are rows; and steps of
        a token a row, which may run kernels of their own. `deferred`: see `rehearse`.
        """
        self.run_dummies(self._largest.fewest_rows(self._largest.tokens), deferred)
        for size in {1, self._largest.rows}:
            self.run_dummies([1] * size, deferred)

    def record(self, most: int, *, rehearsed: bool = False) -> None:
        """Record graphs of small steps, of `most` tokens. A step that is a little larger runs: whatever is made at the
        first launch of its kind would make somebody's first token wait.

        Args:
            most: See above.
            rehearsed: Whether all that these steps launch is compiled, or will be by others, and loaded. Then only the
                largest step of each kind runs before it is recorded, for what Triton and torch make at a first launch.
        """
        largest = self._largest
        shapes = GraphShapes(most, largest.rows, largest.tokens, largest.length)
        dummy = self._slots.dummy
        ran: set[tuple[bool, bool]] = set()
        with torch.inference_mode():
            for shape in shapes.all():
                host = HostBatch.of_dummy(dummy, [1 if shape.is_decode else 2]).padded(shape, dummy)
                laid = self._lay(_NOTHING, host, _of_reads(host, host.sampled_slots), shape.room)
                assert all(map(self._columns.holds, laid.rows + laid.attention.arrays() + laid.reads))
                step = partial(self._draw_all, host, laid)
                if not rehearsed or shape.kind not in ran:
                    step()
                else:
                    self._columns.fetch()  # in vain: what is laid, is fetched
                ran.add(shape.kind)
                self._graphs.record(shape, step)
        self._shapes = shapes
        self.run_dummies(largest.fewest_rows(most + 1), draw=False)

    def _draw_all(self, host: HostBatch, laid: _Laid) -> Tensor:
        """A step, and what its reads draw without rules; [reads, vocab] logits."""
        logits = self._logits(host, self._forward(host, laid)[1], laid)
        self._draws.plainly(logits, laid.reads[0])
        return logits

    def run_dummies(self, counts: Sequence[int], deferred: Deferred = nullcontext, *, draw: bool = True) -> None:
        """A step of rows of the dummy, seated anew, with so many tokens each, logits for the most reads and positions
        of prompts that it could have, and all that may be drawn and reported for them. `deferred`: see `rehearse`.
        """
        rows, positions = self._largest.rows, self._prompt_logprobs.positions
        with torch.inference_mode():
            self._slots.init_dummy()
            host = HostBatch.of_dummy(self._slots.dummy, counts)
            _, hidden = self._forward(host, self._lay(_NOTHING, host, ()))
            logits = self._model.logits(hidden[: max(rows, positions)].clone())  # reads are gathered from the tokens
            if draw:
                self._draws.rehearse(logits[:rows], deferred, self._max_logprobs)
                self._prompt_logprobs.rehearse(logits[:positions], self._max_logprobs)

    # --- steps ------------------------------------------------------------------------------------------------------

    def launch(self, plan: Plan) -> StepHandle:
        """Apply the plan's differences, move its rows forward, draw its reads."""
        timer = self._timers.start()
        with torch.inference_mode():
            self._slots.admit(plan.admitted)
            if not plan.slots:
                self._apply(plan, self._lay(plan, None, ()))
                self._columns.fetch()
                return timer.stop(lambda ms: Result(plan.step, [], [], device_ms=ms))
            host = HostBatch.of(plan, self._slots.host.bounds)
            if not plan.prompt_logprobs_rows and (shape := self._shape_for(host)):
                return self._replay(plan, host, shape, timer)
            return self._run(plan, host, timer)

    def _shape_for(self, host: HostBatch) -> GraphShape | None:
        """Of the recorded step that does what this one does, if there is one."""
        if host.is_decode:
            return self._shapes.of_decode(len(host.slots))
        return self._shapes.of_prompts(len(host.ids), len(host.slots), int(np.count_nonzero(host.counts == 1)))

    def _replay(self, plan: Plan, host: HostBatch, shape: GraphShape, timer: StepTimer) -> StepHandle:
        """A recorded step. It draws without rules in any case: where these are asked for, on behalf of the dummy."""
        dummy, reads = self._slots.dummy, self._draws.reads_of(plan.step, host.sampled_slots, timer)
        host = host.padded(shape, dummy)
        drawing = host.sampled_slots if reads.are_plain else np.full_like(host.sampled_slots, dummy)
        asked = () if reads.are_plain else (reads.slots,)
        laid = self._lay(plan, host, _of_reads(host, drawing), shape.room, asked)
        self._apply(plan, laid)
        logits = self._graphs.replay(shape)
        if reads.are_plain:
            return self._draws.brought(reads, logits, PromptScores())
        where = copied(laid.asked[0])
        return self._draws.as_asked(reads, logits[: len(reads.slots)], where, PromptScores())

    def _run(self, plan: Plan, host: HostBatch, timer: StepTimer) -> StepHandle:
        """A step of any shape."""
        laid = self._lay(plan, host, _of_reads(host, host.sampled_slots))
        self._apply(plan, laid)
        batch, hidden = self._forward(host, laid)
        of_prompts = self._look_at_prompts(plan, host, batch, hidden) if plan.prompt_logprobs_rows else PromptScores()
        if not plan.sampled_rows:
            return timer.stop(lambda ms: Result(plan.step, [], [], device_ms=ms, prompt_logprobs=of_prompts.collect()))
        logits, where = self._logits(host, hidden, laid), laid.reads[0]
        reads = self._draws.reads_of(plan.step, host.sampled_slots, timer)
        if not reads.are_plain:
            return self._draws.as_asked(reads, logits, where, of_prompts)
        self._draws.plainly(logits, where)
        return self._draws.brought(reads, logits, of_prompts)

    def _lay(
        self,
        plan: Plan,
        host: HostBatch | None,
        reads: tuple[Column, ...],
        room: PaddedLimits | None = None,
        asked: tuple[Column, ...] = (),
    ) -> _Laid:
        """Everything that the step takes from the host; what has always the same length in steps of one shape is
        fetched, and stands in the same place each time. The device visits the rest: reads that a recorded step does
        not serve, and the plan's differences.
        """
        rows: tuple[Column, ...] = ()
        attention: AttentionMetadata[Ints] = AttentionMetadata()
        if host is not None:
            rows, attention = host.columns(), self._attention.build_metadata(host.counts, host.bounds, room)
        fetched = (rows, attention.arrays(), reads)
        visited = (asked, self._slots.columns(plan), self._transfer.columns(plan))
        laid = iter(self._columns.lay([*itertools.chain(*fetched)], [*itertools.chain(*visited)]))
        parts = [tuple(itertools.islice(laid, len(part))) for part in fetched + visited]
        return _Laid(parts[0], attention.with_arrays(parts[1]), *parts[2:])

    def _apply(self, plan: Plan, laid: _Laid) -> None:
        """The plan's differences."""
        self._slots.apply(plan, laid.slots)
        self._transfer.apply(plan, laid.transfer)

    def _forward(self, host: HostBatch, laid: _Laid) -> tuple[Batch, Tensor]:
        """The step's batch and its hidden states, [tokens, hidden]."""
        self._columns.fetch()
        batch = self._batches.begin(host, laid.rows, laid.attention)
        self._attention.prepare(batch.rows)
        return batch, self._model.hidden(batch.tokens, batch.positions, self._attention)

    def _logits(self, host: HostBatch, hidden: Tensor, laid: _Laid) -> Tensor:
        """[reads, vocab] of the positions that are read."""
        return self._model.logits(hidden if host.is_decode else hidden.index_select(0, laid.reads[1]))

    def _look_at_prompts(self, plan: Plan, host: HostBatch, batch: Batch, hidden: Tensor) -> PromptScores:
        wanted = [self._slots.host.prompt_logprobs[plan.slots[scored.row]] for scored in plan.prompt_logprobs_rows]
        return self._prompt_logprobs.launch(plan, host, batch, hidden, wanted)


@dataclass(frozen=True)
class _Laid:
    """A step's columns on the device, by who asked for them."""

    rows: tuple[Tensor, ...] = ()
    attention: AttentionMetadata[Tensor] = field(default_factory=AttentionMetadata)
    reads: tuple[Tensor, ...] = ()
    asked: tuple[Tensor, ...] = ()
    slots: tuple[Tensor, ...] = ()
    transfer: tuple[Tensor, ...] = ()


def _of_reads(host: HostBatch, slots: Ints) -> tuple[Column, ...]:
    """The slots that are drawn for, and where each read's hidden state stands, unless all are read."""
    return (slots,) if host.is_decode else (slots, host.logits_indices)
