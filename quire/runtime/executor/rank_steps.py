"""What a rank does with the engine's plans: all of them are for all ranks, and each stage computes its layers.

Rows are sampled in the last stage. The ranks of the first stage are told the tokens, and wait for those that a plan's
rows read: which these are follows from the plans before, so no message asks for them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from quire.compute.mesh import Mesh
from quire.foundation.messages.workers import Plan, Result, TokenBitmasks
from quire.foundation.processes.launch import StageEnds
from quire.runtime.executor.message_ring import MessageReader, MessageWriter
from quire.runtime.executor.rank_messages import StepDone, fingerprint
from quire.runtime.executor.stage_rings import max_unread, open_reader, open_writer
from quire.runtime.worker.steps_in_flight import SampledSteps

if TYPE_CHECKING:
    from quire.runtime.worker.worker import Worker


class SampledTokens(msgspec.Struct, frozen=True, array_like=True):
    """What the last stage tells the first: of a step, how many tokens each sampled row gained, and which."""

    step: int
    counts: list[int]
    tokens: list[int]


class RankSteps:
    """Executes plans on one rank.

    Args:
        worker: With the rank's part of the model.
        mesh: The rank's place.
        ends: Of the links to other stages.
    """

    def __init__(self, worker: Worker, mesh: Mesh, ends: StageEnds) -> None:
        self._worker = worker
        self._mesh = mesh
        self._arrivals = (
            None if ends.tokens_in is None else TokenArrivals(open_reader(ends.tokens_in), worker, max_unread(mesh.pp))
        )
        self._tokens_out: MessageWriter | None = None if ends.tokens_out is None else open_writer(ends.tokens_out)

    def execute(self, plan: Plan, masks: Callable[[], TokenBitmasks]) -> Result | StepDone:
        """Run a step; returns what the rank tells the engine of it. One rank sends the result, the others of the last
        stage a fingerprint of it."""
        if self._arrivals is not None:
            self._arrivals.wait_for(plan)
        if not self._mesh.is_last:
            self._worker.execute(without_samples(plan))
            return StepDone(plan.step)
        result = self._worker.execute(plan, masks)
        if self._tokens_out is not None and plan.sampled_rows:
            self._tokens_out.write(msgspec.msgpack.encode(SampledTokens(plan.step, result.counts, result.tokens)))
        return result if self._mesh.tp_rank == 0 else StepDone(result.step, fingerprint(result))


class TokenArrivals:
    """Brings a first stage's rank the tokens that were sampled.

    Args:
        link: With a SampledTokens for each step that samples.
        worker: The rank's.
        unread: Steps whose tokens may be left unread.
    """

    def __init__(self, link: MessageReader, worker: Worker, unread: int) -> None:
        self._link = link
        self._worker = worker
        self._unread = unread
        self._decoder = msgspec.msgpack.Decoder(SampledTokens)
        self._due: deque[tuple[int, list[int]]] = deque()  # step and slots
        self._sampled = SampledSteps()
        self._arrived = 0

    def wait_for(self, plan: Plan) -> None:
        """Wait for all tokens that were sampled for the plan's slots, and note that it will sample some."""
        needed = self._sampled.read_by(plan)
        while self._arrived < needed or len(self._due) > self._unread:
            self._take()
        if plan.sampled_rows:
            self._due.append((plan.step, self._sampled.sampled_by(plan)))

    def _take(self) -> None:
        """Receive the tokens of the next step that samples."""
        sampled = self._decoder.decode(self._link.read())
        step, slots = self._due.popleft()
        assert sampled.step == step, f"tokens of step {sampled.step}, expected those of {step}"
        gained = [slot for slot, count in zip(slots, sampled.counts, strict=True) if count]
        self._worker.learn_tokens(gained, sampled.tokens)
        self._arrived = step


def without_samples(plan: Plan) -> Plan:
    """The plan as an earlier stage runs it: nothing is sampled or reported."""
    return msgspec.structs.replace(plan, sampled_rows=[], masked=[], prompt_logprobs_rows=[])


def for_earlier_stage(plan: Plan) -> Plan:
    """The plan as an earlier stage runs it on a GPU: nothing is reported, and no step waits for bitmasks. Which rows
    are sampled stays in the plan, since all stages pad a step by that."""
    return msgspec.structs.replace(plan, masked=[], prompt_logprobs_rows=[])
