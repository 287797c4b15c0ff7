"""Samples tokens from the logits of all sampled positions of a step at once, without waiting for the device, unless
logits processors need tokens on the host.

The recorded or launched step samples positions that need only their slot's sampling parameters (`Sampler.sample`). The
other, *late* positions are sampled after it, and of these the masked ones once their bitmasks arrive (`Sampler.end`). A
late position takes these steps, in vLLM's order:

1. Its logits are set apart.
2. Bitmasks of structured outputs are applied.
3. Logits transforms are applied: allowed tokens, bad words, stop tokens before min_tokens, logit_bias, logits
   processors, penalties (`logits_transforms.py`).
4. The op `sample` takes the likeliest token, or draws one by temperature, min_p, top_k and top_p.
5. The slot stores and counts the token, and so do transforms that depend on tokens.
6. Log probabilities are launched (`logprobs.py`).
7. Tokens and faults go to the host, where they become a Result (`sampled_outputs.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.compute.attention.metadata import IntArray
from quire.compute.kernels.dispatch import kernel
from quire.compute.kernels.reference.sample import UNSOUND, SamplingColumns, SamplingThresholds, apply_thresholds
from quire.foundation.messages.workers import Result, TokenBitmasks
from quire.runtime.worker.buffer_ring import BufferRing
from quire.runtime.worker.host_memory import upload
from quire.runtime.worker.sampling.logprobs import LogprobsMode, warm_up_logprobs
from quire.runtime.worker.sampling.sampled_outputs import (
    TRANSFORMED_UNSOUND,
    Sampled,
    SampledOutputs,
    errors_of,
    result_of_tokens,
)
from quire.runtime.worker.sampling.token_bitmasks import BitmaskBuffer
from quire.runtime.worker.sampling.token_rules import ActiveRows
from quire.runtime.worker.slot_table import SlotTable
from quire.runtime.worker.stage_tokens import StageTokens
from quire.runtime.worker.staging_buffer import to_device_memory
from quire.runtime.worker.step import Step
from quire.runtime.worker.step_handle import MaskedStepHandle, StepHandle

Deferred = Callable[[], AbstractContextManager[None]]
"""Makes a context for launches that only some requests need, so that a start need not wait for their compilation."""
Errors = Callable[[npt.NDArray[np.int8]], Mapping[int, str]]
"""Finds which positions failed, and why, from the faults of all sampled positions."""


class Sampler:
    """Samples tokens for the slots of a table.

    Args:
        most: Maximum sampled positions of a step.
        max_masked: Maximum positions of a step that have bitmasks; None: `most`.
        stages: Other stages of a pipeline, which receive the sampled tokens; None if there are none.
        rows: Maximum rows of a step with drafts, each of which also reports how many tokens it gains.
    """

    def __init__(
        self,
        slots: SlotTable,
        most: int,
        mode: LogprobsMode,
        ring: BufferRing,
        max_masked: int | None = None,
        stages: StageTokens | None = None,
        rows: int = 0,
    ) -> None:
        self._slots = slots
        self._mode: LogprobsMode = mode
        self._stages = stages
        self.outputs = SampledOutputs(most + rows, ring)
        self.bitmasks = BitmaskBuffer(max_masked or most, slots.vocab_size, slots.device)

    # --- before and in the step -------------------------------------------------------------------------------------

    def begin(self, step: Step, *, can_stop: bool = False) -> None:
        """Decide which positions of the step are sampled late, and which log probabilities are reported.

        A step that can stop at its logits does so if late positions wait for bitmasks alone. Once these are applied to
        the logits, the slots' parameters suffice to sample all positions, and nothing reads the logits afterwards.
        """
        slots, masked = step.slots, step.host.masked
        step.logprobs = self._slots.host.logprobs_request(slots, self._mode)
        unmasked = np.delete(slots, masked) if len(masked) else slots
        if step.keeps_scores or self._slots.transforms.any_active(unmasked):
            step.late, step.masked = np.arange(len(slots)), masked
        elif len(masked):
            step.late, step.masked = masked, np.arange(len(masked))
        only_masked = 0 < len(step.masked) == len(step.late) and step.logprobs is None
        step.stops_at_logits = can_stop and only_masked and not self._slots.transforms.any_active(slots[step.late])

    def sample(self, logits: Tensor, slots: Tensor) -> None:
        """Sample logits [sampled, vocab] by the parameters of `slots` [sampled] int64 alone, and store each token in
        its slot as the next step's input. The host decides nothing, so a graph can capture this."""
        number = len(logits)
        sample_and_advance(logits, slots, self._slots, self.outputs.tokens[:number], self.outputs.faults[:number])
        self.outputs.send()

    # --- behind the step --------------------------------------------------------------------------------------------

    def end(self, step: Step, logits: Tensor, replay_rest: Callable[[], None]) -> StepHandle:
        """Sample the late positions, now or once their bitmasks arrive, and return the handle of the step's result.

        Args:
            step: The step that `begin` was given, once it is launched.
            logits: [sampled, vocab], or more with padding. Changed in place unless log probabilities are reported of
                them.
            replay_rest: Samples all positions of a step that `stops_at_logits`, from the same logits.
        """
        if not len(step.late):
            return self._report(step, logits)
        # 1. The logits of late positions are set apart. A step that stops at its logits samples all from them.
        if step.stops_at_logits:
            rows, own = torch.from_numpy(step.late), logits
            finish = partial(self._replay_rest, step, logits, replay_rest)
        else:
            assert step.late_columns is not None
            sizes = [len(step.late), len(step.late), len(step.masked)]
            positions, slots, rows = torch.split(to_device_memory(step.late_columns), sizes)
            logits = logits[: len(step.slots)]
            own = logits if step.all_late else logits.index_select(0, positions)
            if len(step.masked) and step.all_late and step.logprobs:
                own = own.clone()
            finish = partial(self._sample_late, step, logits, own, positions, slots)
        if not len(step.masked):
            return finish()

        def finish_masked(masks: TokenBitmasks) -> StepHandle:
            # 2. Bitmasks are applied, once they are there.
            assert masks.step == step.number, f"bitmasks of step {masks.step}, expected those of {step.number}"
            assert len(masks.bits) == len(step.masked), "bitmasks of other rows than those that wait"
            with torch.inference_mode():
                self.bitmasks.apply(own, rows, masks.bits)
                return finish()

        return MaskedStepHandle(finish_masked, step.timer.wait)

    def _replay_rest(self, step: Step, logits: Tensor, replay_rest: Callable[[], None]) -> StepHandle:
        replay_rest()
        return self._report(step, logits, partial(errors_of, transformed=set(step.late.tolist())))

    def _sample_late(
        self, step: Step, logits: Tensor, own: Tensor, positions: Tensor, device_slots: Tensor
    ) -> StepHandle:
        """Sample the late `positions` [late] int64 of `device_slots` [late] int64 from their `own` logits,
        [late, vocab]."""
        number, slots, outputs = len(own), step.slots[step.late], self.outputs
        if step.keeps_scores or self._slots.transforms.any_active(slots):
            # 3. and 4. Transforms, and sampling.
            sampled = sample_with_transforms(
                own, slots, self._slots, keep_scores=step.keeps_scores, device_slots=device_slots
            )
            # 5. The slots keep the tokens, and count them.
            self._slots.last_token.index_copy_(0, device_slots, sampled.tokens)
            self._slots.num_sampled.index_add_(0, device_slots, torch.ones_like(device_slots))
            in_place = False
        else:  # 4. and 5. at once, with few calls: a step on a CPU has to wait for each
            in_place = step.all_late
            tokens = outputs.tokens[:number] if in_place else torch.empty_like(device_slots)
            faults = outputs.faults[:number] if in_place else torch.empty_like(device_slots, dtype=torch.int8)
            sampled = Sampled(tokens, faults, {}, None)
            sample_and_advance(own, device_slots, self._slots, tokens, faults)
        if not in_place:
            outputs.tokens.index_copy_(0, positions, sampled.tokens)
            outputs.faults.index_copy_(0, positions, sampled.faults)
        outputs.send()
        scores = logits if sampled.scores is None else sampled.scores  # of all positions, where they are kept
        return self._report(step, scores, partial(_late_errors, step, sampled))

    def _report(self, step: Step, logits: Tensor, errors: Errors = errors_of) -> StepHandle:
        """Launch the reports of a step all of whose positions are sampled. Log probabilities are those of `logits`
        [sampled, vocab], and `errors` finds the failed positions."""
        self._send_to_stages(step.number)
        number, request = len(step.slots), step.logprobs
        # 6. Log probabilities.
        reported = request.launch(logits, self.outputs.tokens[:number]) if request else None
        # 7. Tokens and faults are on their way to the host.
        tokens, faults = self.outputs.on_host()

        def result(device_ms: float) -> Result:
            logprobs = [] if reported is None else reported()
            failed = errors(faults[:number])
            return result_of_tokens(
                step.number, tokens[:number].tolist(), failed, logprobs, step.prompt_logprobs(), device_ms
            )

        return step.timer.stop(result)

    # --- start ------------------------------------------------------------------------------------------------------

    def warm_up(self, logits: Tensor, deferred: Deferred, max_logprobs: int) -> None:
        """Run everything that may sample from such logits, and the copy to the host."""
        warm_up(logits, self._slots, self._mode, deferred, max_logprobs)
        with deferred():
            self.bitmasks.warm_up(logits)
        self.outputs.send()
        self._send_to_stages(0)

    def _send_to_stages(self, step: int) -> None:
        if self._stages is not None:
            self._stages.send_tokens(step, self._slots.last_token)


def _late_errors(step: Step, sampled: Sampled, faults: npt.NDArray[np.int8]) -> Mapping[int, str]:
    """Return which of all positions failed, and why, in a step whose late positions are `sampled`."""
    if not sampled.broken and not faults.any():
        return {}
    late = step.late.tolist()
    changed = {late[place] for place in (*sampled.transformed, *step.masked.tolist())}
    return errors_of(faults, {late[place]: text for place, text in sampled.broken.items()}, changed)


def sample_and_advance(logits: Tensor, where: Tensor, slots: SlotTable, tokens: Tensor, faults: Tensor) -> None:
    """Sample by the slots' parameters alone, without logits transforms; the slots store and count the tokens. The host
    decides nothing, so a graph can capture this.

    Args:
        logits: [sampled, vocab]; not changed.
        where: [sampled] int64 on the device, the slot of each position; padding has the dummy slot.
        tokens: [sampled] int64, receives the tokens.
        faults: [sampled] int8, receives the faults.
    """
    kernel("sample", logits.device.type)(logits, where, columns_of(slots), tokens, faults, slots.last_token)


def columns_of(slots: SlotTable) -> SamplingColumns:
    """Return the columns of the table that the op `sample` reads."""
    return SamplingColumns(slots.temperature, slots.top_k, slots.top_p, slots.min_p, slots.seed, slots.num_sampled)


def sample_with_transforms(
    logits: Tensor,
    sampled_slots: IntArray,
    slots: SlotTable,
    *,
    keep_scores: bool = False,
    device_slots: Tensor | None = None,
) -> Sampled:
    """Sample a token for each position, with logits transforms where its slot has any. The table's columns do not
    change, but its transforms note the tokens.

    Args:
        logits: [sampled, vocab]; not changed.
        sampled_slots: [sampled], the slot of each position.
        keep_scores: Whether to return the scores too.
        device_slots: `sampled_slots` as a device tensor, if there is one already.
    """
    where = upload(sampled_slots, logits.device) if device_slots is None else device_slots
    active = slots.transforms.active_rows(sampled_slots)
    if active and len(active) == len(sampled_slots):
        return _sample_transformed(logits, where, slots, active, keep_scores=keep_scores)
    sampled = _sample_plain(logits, where, slots, keep_scores=keep_scores)
    if not active:
        return sampled
    rows = upload([row for row, _ in active], logits.device)
    among_active = [(place, slot) for place, (_, slot) in enumerate(active)]
    transformed = _sample_transformed(
        logits.index_select(0, rows), where.index_select(0, rows), slots, among_active, keep_scores=keep_scores
    )
    sampled.tokens.index_copy_(0, rows, transformed.tokens)
    sampled.faults.index_copy_(0, rows, transformed.faults)
    if sampled.scores is not None and transformed.scores is not None:
        sampled.scores.index_copy_(0, rows, transformed.scores)
    row_of = [row for row, _ in active]
    broken = {row_of[place]: text for place, text in transformed.broken.items()}
    return Sampled(sampled.tokens, sampled.faults, broken, sampled.scores, set(row_of))


def _sample_transformed(
    logits: Tensor, where: Tensor, slots: SlotTable, active: ActiveRows, *, keep_scores: bool
) -> Sampled:
    sound = logits.amax(-1) < float("inf")  # also where a bitmask forbids every token
    logits = logits.clone() if logits.dtype == torch.float32 else logits.float()
    broken = slots.transforms.apply(logits, active)
    sampled = _sample_plain(logits, where, slots, keep_scores=keep_scores)
    faults = torch.where(sampled.faults == UNSOUND, TRANSFORMED_UNSOUND, sampled.faults)
    faults = torch.where(sound, faults, UNSOUND).to(torch.int8)
    slots.transforms.record_tokens(sampled.tokens, active)
    return Sampled(sampled.tokens, faults, broken, sampled.scores, set(range(len(active))))


def _sample_plain(logits: Tensor, where: Tensor, slots: SlotTable, *, keep_scores: bool) -> Sampled:
    number = len(logits)
    tokens = torch.empty(number, dtype=torch.int64, device=logits.device)
    faults = torch.empty(number, dtype=torch.int8, device=logits.device)
    thresholds = (
        SamplingThresholds(logits.new_empty(number, dtype=torch.float32), torch.empty_like(tokens))
        if keep_scores
        else None
    )
    kernel("sample", logits.device.type)(logits, where, columns_of(slots), tokens, faults, thresholds=thresholds)
    scores = (
        None if thresholds is None else apply_thresholds(logits, slots.temperature.index_select(0, where), thresholds)
    )
    return Sampled(tokens, faults, {}, scores)


def warm_up(
    logits: Tensor, slots: SlotTable, mode: LogprobsMode, deferred: Deferred = nullcontext, max_logprobs: int = 1
) -> None:
    """Run everything that may sample from such logits, so that no kernel is compiled, and no memory is missing, while
    requests are served.

    Args:
        logits: [sampled, vocab], any values.
        slots: The slot table, whose dummy slot is sampled for.
        deferred: Context for what only logits transforms and kept scores need. Kernels need not run inside it.
        max_logprobs: Maximum tokens reported beside the sampled one.
    """
    rows = torch.arange(len(logits), device=logits.device)
    where = torch.full_like(rows, slots.dummy)
    tokens, faults = torch.empty_like(rows), torch.empty_like(rows, dtype=torch.int8)
    sample_and_advance(logits, where, slots, tokens, faults)
    warm_up_logprobs(logits, tokens, mode, max_logprobs)
    with deferred():
        chosen = logits.index_select(0, rows)
        held = []  # at the same time, as in a step in which nearly all slots have transforms
        for given in (logits, chosen.float()):
            for keep_scores in {False, mode.startswith("processed")}:
                sampled = _sample_plain(given, where, slots, keep_scores=keep_scores)
                held.append(sampled.scores)
            warm_up_logprobs(given, sampled.tokens, mode, max_logprobs)
        slots.transforms.warm_up(given)
