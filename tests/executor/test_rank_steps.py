"""What the first stage learns of tokens that the last one samples, and when it waits for them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from quire.foundation.messages.workers import Plan
from quire.foundation.processes.shared_memory import SharedMemory
from quire.runtime.executor.cpu_rank import SampledTokens, TokenArrivals, without_samples
from quire.runtime.executor.message_ring import RingReader, RingWriter, ring_bytes
from quire.runtime.executor.rank_links import max_unread, token_ring_bytes
from tests.worker.driver import admitted

STAGES, ROWS = 2, 4


class Slots:
    """A worker that only learns tokens."""

    def __init__(self) -> None:
        self.last: dict[int, int] = {}

    def learn_tokens(self, slots: Sequence[int], tokens: Sequence[int]) -> None:
        self.last.update(zip(slots, tokens, strict=True))


class Stages:
    """A first stage and the ring that the last one writes to; nobody may wait at its ends."""

    def __init__(self) -> None:
        size = token_ring_bytes(STAGES, ROWS)
        memory = SharedMemory(ring_bytes(1, size))
        self.worker = Slots()
        reader = RingReader(memory, 1, 0, lambda: pytest.fail("waits for tokens that are not there"))
        self.arrivals = TokenArrivals(reader, self.worker, max_unread(STAGES))
        self._writer = RingWriter(memory, 1, lambda: None, lambda: pytest.fail("the ring is full"))

    def sampled(self, step: int, counts: list[int], tokens: list[int]) -> None:
        """The last stage has done a step."""
        self._writer.write(msgspec.msgpack.encode(SampledTokens(step, counts, tokens)))


def plan(step: int, slots: list[int], sampled_rows: list[int]) -> Plan:
    return Plan(step=step, slots=slots, counts=[1] * len(slots), sampled_rows=sampled_rows)


def test_a_plan_waits_for_the_tokens_of_its_slots_and_for_no_others() -> None:
    stages = Stages()
    stages.arrivals.wait_for(plan(1, [0, 1, 2], [0, 2]))
    stages.arrivals.wait_for(plan(2, [3], [0]))
    stages.arrivals.wait_for(plan(3, [1], []))
    with pytest.raises(BaseException, match="not there"):
        stages.arrivals.wait_for(plan(4, [2], [0]))
    stages.sampled(1, [1, 1], [70, 72])
    stages.arrivals.wait_for(plan(4, [2], [0]))
    assert stages.worker.last == {0: 70, 2: 72}


def test_a_new_owner_of_a_slot_waits_for_no_token_of_the_one_before() -> None:
    """Which was planned once more than it needed, as it ended by a stop token."""
    stages = Stages()
    stages.arrivals.wait_for(plan(1, [0, 1], [0, 1]))
    owner = admitted(0, seed=1, num_sampled=0)
    stages.arrivals.wait_for(msgspec.structs.replace(plan(2, [0], [0]), admitted=[owner]))
    stages.sampled(1, [1, 1], [70, 71])
    stages.sampled(2, [1], [80])
    stages.arrivals.wait_for(plan(3, [0, 1], []))
    assert stages.worker.last == {0: 80, 1: 71}


def test_a_row_that_failed_gained_nothing() -> None:
    stages = Stages()
    stages.arrivals.wait_for(plan(1, [0, 1, 2], [0, 1, 2]))
    stages.sampled(1, [1, 0, 1], [70, 72])
    stages.arrivals.wait_for(plan(2, [0, 2], [0, 1]))
    assert stages.worker.last == {0: 70, 2: 72}


def test_tokens_that_no_plan_reads_do_not_fill_the_ring() -> None:
    """Many prompts of which each brings one token."""
    stages = Stages()
    for step in range(1, 300):
        slots = [ROWS * step + row for row in range(ROWS)]
        stages.arrivals.wait_for(plan(step, slots, [0, 1, 2, 3]))
        stages.sampled(step, [1] * ROWS, [200_000] * ROWS)


def test_earlier_stages_neither_sample_nor_report() -> None:
    whole = msgspec.structs.replace(plan(1, [0, 1], [0, 1]), masked=[1])
    bare = without_samples(whole)
    assert (bare.sampled_rows, bare.masked, bare.prompt_logprobs_rows) == ([], [], [])
    assert (bare.slots, bare.counts) == (whole.slots, whole.counts)
