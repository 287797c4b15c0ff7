"""Who goes first, and that nobody waits for ever."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from quire.foundation.config.scheduler import Policy
from quire.scheduling.kvcache.block_pool import BlockPool
from quire.scheduling.kvcache.host_pool import HostPool
from quire.scheduling.scheduler.preemption import Preemption
from quire.scheduling.scheduler.running_queue import PRIORITY_S
from quire.scheduling.scheduler.scheduler import Scheduler
from quire.scheduling.scheduler.token_budget import (
    BACKLOG_SHARE,
    DECODE_SHARE,
    LONG_PROMPT_STEPS,
    MAX_STALL_MS,
    MIN_STALL_MS,
    SMALLEST_CHUNK,
    TokenBudget,
)
from tests.engine.harness import add
from tests.engine.test_client_liveness import ManualClock
from tests.executor.fake import FakeExecutor
from tests.executor.fake_adapters import FakeAdapters


class Stage:
    """A scheduler on a fake executor, a step at a time."""

    def __init__(
        self, *, blocks: int = 64, seqs: int = 4, tokens: int = 32, policy: Policy = "fcfs", host: int = 0, **more: Any
    ) -> None:
        self.clock = ManualClock()
        ready = more.pop("ready_host_blocks", None)
        self.executor = FakeExecutor(blocks, 8, num_host_blocks=host, max_in_flight=1, ready_host_blocks=ready)
        preemption = Preemption(HostPool(), more.pop("mode", None), more.pop("preemption_cost", None))
        limits = more.pop("threshold", 0), more.pop("cost", None), more.pop("sizes", ())
        budget = TokenBudget(tokens, *limits, more.pop("performance", "balanced"))
        self.scheduler = Scheduler(BlockPool(blocks, 8), seqs, budget, preemption, self.clock, policy=policy)
        self.tokens = tokens
        self.ended: list[int] = []
        self.counts: list[dict[int, int]] = []

    def step(self) -> None:
        """Plan and process the result once; remembers how far each request moved."""
        plan = self.scheduler.plan()
        if plan is None:
            return
        assert sum(plan.counts) <= self.tokens
        by_slot = {request.slot: request.id for request in self.scheduler.requests() if request.slot is not None}
        self.counts.append({by_slot[slot]: n for slot, n in zip(plan.slots, plan.counts, strict=True)})
        self.executor.submit(plan)
        result = self.executor.collect(None)
        assert result is not None
        self.ended += [request.id for request in self.scheduler.process_result(result).ended]

    def steps(self, until: int, most: int = 2_000) -> Iterator[int]:
        """Steps until a request has ended."""
        for number in range(most):
            if until in self.ended:
                return
            yield number
            self.step()
        raise AssertionError(f"request {until} did not end in {most} steps")


def test_a_request_that_awaits_something_takes_nobodys_place() -> None:
    stage = Stage(seqs=1, policy="priority")
    stage.scheduler.add(add(0, [1] * 5, 10))
    stage.step()
    stage.scheduler.add(add(1, [1] * 5, 10, priority=-1), awaits=["its grammar"])
    stage.step()
    assert stage.scheduler.stats.preemptions == 0
    stage.scheduler.arrived(1, "its grammar")
    stage.step()
    assert stage.scheduler.stats.preemptions == 1


def test_a_requests_slot_names_its_adapter_whenever_it_is_admitted() -> None:
    """Also after it was preempted, and in a slot that another has left."""
    stage = Stage(seqs=1, policy="priority")
    stage.executor.adapters = FakeAdapters({})
    stage.executor.adapters.slots[3] = "digest"
    stage.scheduler.add(add(0, [1] * 5, 10, priority=1), awaits=["adapter"])
    assert stage.scheduler.plan() is None
    first = stage.scheduler.get(0)
    assert first is not None
    first.adapter_slot = 3
    stage.scheduler.arrived(0, "adapter")
    stage.scheduler.arrived(7, "adapter")  # it is over
    found = []
    for number in range(20):
        if number == 2:
            stage.scheduler.add(add(1, [1] * 5, 2, priority=0))
        if (plan := stage.scheduler.plan()) is not None:
            found += [owner.adapter_slot for owner in plan.admitted]
            assert stage.scheduler.last_step == stage.scheduler.finished_step + 1 == plan.step
            stage.executor.submit(plan)
            result = stage.executor.collect(None)
            assert result is not None
            stage.scheduler.process_result(result)
        assert stage.scheduler.last_step == stage.scheduler.finished_step
    assert found == [3, 0, 3]


def test_an_urgent_arrival_takes_the_place_of_a_running_request_that_then_finishes() -> None:
    stage = Stage(seqs=1, policy="priority")
    stage.scheduler.add(add(0, [1] * 20, 30, priority=5))
    for _ in range(5):
        stage.step()
    stage.scheduler.add(add(1, [2] * 20, 3, arrival=1.0, priority=0))
    for _ in stage.steps(until=0):
        pass
    assert stage.ended == [1, 0]
    assert stage.scheduler.stats.preemptions == 1


def test_by_arrival_a_priority_means_nothing() -> None:
    stage = Stage(seqs=1)
    stage.scheduler.add(add(0, [1] * 20, 10, priority=5))
    stage.step()
    stage.scheduler.add(add(1, [2] * 20, 3, arrival=1.0, priority=-5))
    for _ in stage.steps(until=1):
        pass
    assert stage.ended == [0, 1]
    assert stage.scheduler.stats.preemptions == 0


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_nobody_starves_under_a_flood(policy: Policy) -> None:
    stage = Stage(seqs=2, blocks=16, policy=policy)
    stage.scheduler.add(add(0, [7] * 30, 40, priority=1))
    for number in stage.steps(until=0):
        stage.clock.time += 1.0
        now = float(number)
        stage.scheduler.add(add(1_000 + number, [number % 512] * 20, 8, arrival=now, priority=0))
    # Ahead of it go only those that arrive within the minute that a level of priority is worth; one ends in 4 steps.
    assert len(stage.counts) < PRIORITY_S * 4 + 40 + 30


def test_a_long_prompt_does_not_hold_up_those_behind_it_for_ever() -> None:
    stage = Stage(tokens=16)
    stage.scheduler.add(add(0, [1] * 200, 2))
    stage.scheduler.add(add(1, [2] * 4, 2, arrival=1.0))
    for _ in stage.steps(until=1):
        pass
    assert stage.ended == [0, 1] or stage.ended == [1]


def test_the_long_prefill_threshold_leaves_room_beside_a_long_prompt() -> None:
    stage = Stage(tokens=32, threshold=8)
    stage.scheduler.add(add(0, [1] * 100, 2))
    stage.scheduler.add(add(1, [2] * 5, 2, arrival=1.0))
    stage.step()
    assert stage.counts == [{0: 8, 1: 5}]


class LinearCost:
    """A millisecond a token in a chunk, two in a long context, and so many for a step of streaming rows."""

    learned: tuple[float, float, float] | None = None

    def __init__(self, free_tokens: int = 0, streams_ms: float = 5.0) -> None:
        self.free_tokens = free_tokens
        self._streams_ms = streams_ms

    def step_ms(self, tokens: int, context: int) -> float:
        return self._streams_ms

    def token_ms(self, context: int) -> float:
        return 1.0 if context < 100 else 2.0

    def learn(self, step_ms: float, chunk_ms: float, measured_ms: float) -> None:
        self.learned = (step_ms, chunk_ms, measured_ms)


def beside_streams(stage: Stage, *prompts: int, streams: int = 1) -> list[int]:
    """Tokens of prompts in each step, from when they come while other requests stream until all are computed."""
    for number in range(streams):
        stage.scheduler.add(add(-1 - number, [510 - number], 500))
    while len(stage.scheduler.waiting):
        stage.step()
    begun = len(stage.counts)
    for number, length in enumerate(prompts):
        stage.scheduler.add(add(number, [2 + number] * length, 1, arrival=1.0 + number))
    while not set(range(len(prompts))) <= set(stage.ended):
        assert len(stage.counts) < 2_000, "somebody starves"
        stage.step()
    assert all(counts[-1 - number] == 1 for counts in stage.counts[begun:] for number in range(streams))
    return [sum(n for number, n in counts.items() if number >= 0) for counts in stage.counts[begun:]]


def test_beside_a_stream_a_chunk_fits_the_time_and_shrinks_with_its_context() -> None:
    chunks = beside_streams(Stage(tokens=512, blocks=600, cost=LinearCost()), 4_000)
    assert chunks[0] == int((MAX_STALL_MS - 5) / 2)  # counted in the context of the longest chunk there could be
    assert max(chunks) == chunks[0]
    assert chunks[-2] == SMALLEST_CHUNK, "what is left at last is worth no long stall"
    assert sum(chunks) == 4_000


def test_a_queue_of_prompts_is_worth_a_share_of_its_time_in_each_step_and_one_prompt_little() -> None:
    (first, *_) = beside_streams(Stage(tokens=512, seqs=20, blocks=400, cost=LinearCost()), *[60] * 16)
    assert first == 16 * 60 * BACKLOG_SHARE == 60
    (first, *_) = beside_streams(Stage(tokens=512, cost=LinearCost(streams_ms=80.0)), 60)
    assert first == DECODE_SHARE * 80


def test_where_each_token_costs_the_same_a_chunk_takes_time_that_nobody_notices() -> None:
    (first, *_) = beside_streams(Stage(tokens=512, cost=LinearCost()), 60)
    assert first == MIN_STALL_MS - 5 > SMALLEST_CHUNK
    (first, *_) = beside_streams(
        Stage(tokens=512, cost=LinearCost(), sizes=[(size, 500) for size in range(1, 512)]), 60
    )
    assert first == SMALLEST_CHUNK


def test_a_queue_is_worth_nothing_where_streams_come_first() -> None:
    stage = Stage(tokens=512, seqs=20, blocks=400, cost=LinearCost(), performance="interactivity")
    (first, *_) = beside_streams(stage, *[60] * 16)
    assert first == MIN_STALL_MS - 5 < 16 * 60 * BACKLOG_SHARE


def test_where_nobody_reads_meanwhile_prompts_have_all_of_a_step() -> None:
    stage = Stage(tokens=512, seqs=20, blocks=400, cost=LinearCost(), performance="throughput")
    (first, *_) = beside_streams(stage, *[60] * 16)
    assert first == 511


def test_a_prompt_that_several_share_counts_once() -> None:
    stage = Stage(tokens=512, seqs=5, blocks=400, cost=LinearCost())
    stage.scheduler.add(add(-1, [1], 100))
    stage.step()
    stage.scheduler.add(add(0, [2] * 1_600, 2))
    for number in (1, 2, 3):
        stage.scheduler.add(add(number, [2] * 1_600, 2, fork_of=0))
    stage.step()
    assert stage.counts[1] == {-1: 1, 0: int(1_603 * BACKLOG_SHARE / 2)}


def test_a_chunk_fills_the_step_with_what_is_free() -> None:
    (first, *_) = beside_streams(Stage(tokens=512, seqs=9, cost=LinearCost(free_tokens=38)), 60, streams=8)
    assert first == 30


def test_many_prompts_beside_a_stream_share_its_time_and_all_get_through() -> None:
    stage = Stage(tokens=512, seqs=60, blocks=600, cost=LinearCost())
    beside = beside_streams(stage, *[60] * 49)
    assert MAX_STALL_MS - 5 - SMALLEST_CHUNK < max(beside) <= MAX_STALL_MS - 5
    assert stage.ended[:49] == list(range(49))


def test_beside_streams_short_prompts_do_not_wait_for_all_of_a_long_one() -> None:
    stage = Stage(tokens=512, seqs=5, blocks=900, cost=LinearCost())
    stage.scheduler.add(add(-1, [510], 500))
    stage.step()
    stage.scheduler.add(add(0, [2] * 6_000, 1, arrival=1.0))
    stage.step()
    for number in (1, 2):
        stage.scheduler.add(add(number, [2 + number] * 60, 1, arrival=1.0 + number))
    steps = sum(1 for _ in stage.steps(until=2))
    assert steps < LONG_PROMPT_STEPS
    assert 0 not in stage.ended
    assert all(counts[0] >= sum(n for number, n in counts.items() if number > 0) for counts in stage.counts[1:])
    for _ in stage.steps(until=0):
        pass


SIZES = [32, 48, 64, 128, 192]
FOR_ALL = [(size, 500) for size in SIZES]


def test_where_time_cuts_a_step_has_one_of_the_sizes() -> None:
    chunks = beside_streams(Stage(tokens=512, blocks=400, cost=LinearCost(), sizes=FOR_ALL), 2_100)
    assert [1 + chunk for chunk in chunks[:-1]] == [64] * 2 + [48] * 11 + [32] * (len(chunks) - 14)
    assert sum(chunks) == 2_100


def test_sizes_that_are_recorded_for_fewer_rows_are_none_of_a_step_with_more() -> None:
    sizes = [(48, 20), (64, 33), (96, 500)]
    for streams, expected in ((19, 48), (20, 64), (32, 64), (33, 96)):
        stage = Stage(tokens=512, seqs=60, blocks=400, cost=LinearCost(), sizes=sizes)
        (first, *_) = beside_streams(stage, 200, streams=streams)
        assert streams + first == expected


def test_the_last_of_several_prompts_fills_a_step_up_and_the_next_waits() -> None:
    stage = Stage(tokens=512, seqs=9, blocks=400, cost=LinearCost(free_tokens=80), sizes=FOR_ALL)
    beside_streams(stage, 25, 50, 50, streams=3)
    assert [{k: n for k, n in counts.items() if k >= 0} for counts in stage.counts[1:4]] == [
        {0: 25, 1: 36},  # 64 with the streams
        {1: 14, 2: 47},
        {2: 3},  # its end: no time cuts it
    ]


def test_running_prompts_fill_a_step_up_together() -> None:
    stage = Stage(tokens=512, seqs=9, blocks=400, threshold=20, cost=LinearCost(free_tokens=40), sizes=FOR_ALL)
    beside_streams(stage, 100, 100, streams=3)
    assert [{k: n for k, n in counts.items() if k >= 0} for counts in stage.counts[1:4]] == [{0: 20, 1: 9}] * 3


def test_a_rest_of_time_that_is_smaller_than_any_chunk_is_left() -> None:
    stage = Stage(tokens=512, seqs=9, blocks=400, cost=LinearCost(free_tokens=64 + SMALLEST_CHUNK - 1), sizes=FOR_ALL)
    beside_streams(stage, 61, 61, streams=3)
    assert [{k: n for k, n in counts.items() if k >= 0} for counts in stage.counts[1:3]] == [{0: 61}, {1: 61}]


def test_forks_do_not_wait_while_a_short_prompt_takes_the_time() -> None:
    stage = Stage(tokens=512, seqs=9, blocks=400, cost=LinearCost())
    stage.scheduler.add(add(-1, [510], 500))
    stage.step()
    stage.scheduler.add(add(0, [2] * 4, 9))
    stage.scheduler.add(add(1, [2] * 4, 9, fork_of=0))
    stage.scheduler.add(add(2, [2] * 4, 9, fork_of=0))
    stage.scheduler.add(add(3, [3] * 60, 9, arrival=1.0))
    stage.scheduler.add(add(4, [4] * 60, 9, arrival=2.0))
    stage.step()
    assert stage.counts[-1] == {-1: 1, 0: 4, 3: 16}
    stage.step()
    assert stage.counts[-1] == {-1: 1, 0: 1, 3: 20, 1: 1, 2: 1}


def test_prompts_that_are_cached_but_for_a_token_do_not_wait_for_time() -> None:
    stage = Stage(tokens=512, seqs=9, blocks=400, cost=LinearCost())
    stage.scheduler.add(add(-1, [510] * 17, 500))
    stage.step()
    stage.scheduler.add(add(0, [2] * 100, 9))
    stage.step()
    stage.scheduler.add(add(1, [510] * 17, 9, arrival=1.0))
    stage.scheduler.add(add(2, [510] * 16 + [3] * 2, 9, arrival=2.0))
    stage.scheduler.add(add(3, [510] * 17, 9, arrival=3.0))
    free = stage.scheduler.pool.num_free
    stage.step()
    assert stage.counts[-1] == {-1: 1, 0: 20, 1: 1}, "who is first in the queue is not overtaken"
    assert stage.scheduler.pool.num_free == free - 2 - 1, "who waits holds nothing"


@pytest.mark.parametrize("streams", [1, 31, 32, 40, 47, 48, 60, 190, 200])
def test_a_prompt_gets_through_beside_any_number_of_streams(streams: int) -> None:
    stage = Stage(tokens=220, seqs=streams + 1, blocks=streams * 20, cost=LinearCost(), sizes=FOR_ALL)
    chunks = beside_streams(stage, 90, streams=streams)
    assert all(chunk >= SMALLEST_CHUNK for chunk in chunks[:-1])
    assert all(streams + chunk in SIZES or streams > 176 for chunk in chunks[:-1])


def test_random_prompts_beside_streams_all_get_through() -> None:
    rng = random.Random(0)
    for _ in range(20):
        streams, tokens = rng.randint(1, 40), rng.choice([64, 100, 250])
        stage = Stage(
            tokens=tokens, seqs=streams + rng.randint(1, 6), blocks=4_000, threshold=rng.choice([0, 0, 20]),
            cost=LinearCost(rng.randint(0, 90), rng.uniform(2, 60)), sizes=rng.choice([FOR_ALL, FOR_ALL, ()]),
        )  # fmt: skip
        lengths = [rng.randint(1, 300) for _ in range(8)]
        assert sum(beside_streams(stage, *lengths, streams=streams)) == sum(lengths)


def test_alone_a_prompt_takes_the_whole_step() -> None:
    stage = Stage(tokens=512, cost=LinearCost())
    stage.scheduler.add(add(1, [2] * 300, 2))
    stage.step()
    assert stage.counts == [{1: 300}]


class FixedPreemptionCost:
    def __init__(self, recompute: float, swap: float) -> None:
        self._recompute, self._swap = recompute, swap

    def recompute_ms(self, tokens: int) -> float:
        return self._recompute

    def swap_ms(self, blocks: int) -> float:
        return self._swap


@pytest.mark.parametrize(("swap_ms", "swaps"), [(1.0, True), (3.0, False)])
def test_preemption_takes_the_cheaper_way(swap_ms: float, swaps: bool) -> None:
    stage = Stage(seqs=1, policy="priority", host=20, preemption_cost=FixedPreemptionCost(2.0, swap_ms))
    stage.scheduler.add(add(0, [1] * 20, 30, priority=5))
    for _ in range(5):
        stage.step()
    stage.scheduler.add(add(1, [2] * 20, 3, arrival=1.0))
    stage.step()
    (victim,) = [request for request in stage.scheduler.requests() if request.id == 0]
    assert victim.swapped is swaps
    assert (stage.scheduler.host.num_free < 20) is swaps
    for _ in stage.steps(until=0):
        pass
    assert stage.scheduler.host.num_free == 20


def test_a_request_is_recomputed_until_host_blocks_are_ready_for_it() -> None:
    ready = 0
    stage = Stage(seqs=1, policy="priority", host=20, mode="swap", ready_host_blocks=lambda: ready)
    stage.scheduler.add(add(0, [1] * 20, 30, priority=5))
    (victim,) = stage.scheduler.requests()
    for number, (blocks, swaps) in enumerate([(0, False), (1, False), (20, True)], start=1):
        ready = blocks
        for _ in range(5):
            stage.step()
        stage.scheduler.add(add(number, [2] * 20, 3, arrival=1.0))
        stage.step()
        assert victim.preemptions == number
        assert victim.swapped is swaps
        for _ in stage.steps(until=number):
            pass
    for _ in stage.steps(until=0):
        pass
    assert stage.scheduler.host.num_free == stage.scheduler.host.num_blocks == 20


def test_prompts_of_one_step_find_what_those_before_them_fill() -> None:
    stage = Stage()
    stage.scheduler.add(add(0, [1] * 20, 2))
    stage.scheduler.add(add(1, [1] * 20, 2, arrival=1.0))
    stage.step()
    assert stage.counts == [{0: 20, 1: 4}]
    assert stage.scheduler.stats.prefix_hits == 16


def test_a_prompt_finds_what_a_step_under_way_fills() -> None:
    stage = Stage(tokens=16)
    stage.scheduler.add(add(0, [1] * 40, 2))
    assert stage.scheduler.plan() is not None
    stage.scheduler.cache_blocks()
    stage.scheduler.cache_blocks()  # nothing is left to do
    assert stage.scheduler.abort(0) is not None
    stage.scheduler.add(add(1, [1] * 40, 2, arrival=1.0))
    plan = stage.scheduler.plan()
    assert plan is not None
    assert plan.admitted[0].length == 16


def test_the_example_of_step_budget() -> None:
    class Cost(LinearCost):
        def token_ms(self, context: int) -> float:
            return 0.05

    cost = Cost(free_tokens=170, streams_ms=10.0)
    stage = Stage(tokens=8_192, seqs=201, blocks=4_000, cost=cost, sizes=[(512, 1_024), (640, 1_024), (768, 1_024)])
    (first, *_) = beside_streams(stage, 8_000, streams=200)
    assert first == 440
