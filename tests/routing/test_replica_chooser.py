"""Who gets a prompt: who has its beginning, unless that is too much for one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from benchmarks.replica_routing import WAYS, Trace, round_robin, run
from quire.serving.replica_chooser import BOUND, HALF_LIFE_S, SLACK, ReplicaChooser, ReplicaLoad
from tests.engine.test_client_liveness import ManualClock

IDLE = ReplicaLoad(0, 0, 1_000, 1_000)


class Stage:
    def __init__(self, replicas: int = 4) -> None:
        self.clock = ManualClock()
        self.chooser = ReplicaChooser(replicas, 16, self.clock)
        self.loads: list[ReplicaLoad | None] = [IDLE] * replicas

    def ask(self, *blocks: int, tokens: int | None = None) -> int:
        return self.chooser.choose(self.loads, [block.to_bytes(4) for block in blocks], tokens or 16 * len(blocks), 16)


def test_a_prefix_goes_where_it_was_sent_before() -> None:
    stage = Stage()
    first = stage.ask(1, 2, 3)
    for suffix in range(10, 15):
        assert stage.ask(1, 2, 3, suffix) == first
    stage.chooser.forget(first)
    stage.loads[first] = None
    other = stage.ask(1, 2, 3)
    assert other != first
    stage.loads[first] = IDLE
    assert stage.ask(1, 2, 3, 4) == other, "its cache was emptied"


def test_the_longest_match_wins() -> None:
    stage = Stage(2)
    stage.loads[1] = None
    assert stage.ask(1, 2) == 0
    stage.loads[0], stage.loads[1] = None, IDLE
    assert stage.ask(1, 2, 3, 4) == 1
    stage.loads[0] = IDLE
    assert stage.ask(1, 2, 3, 4, 5) == 1
    assert stage.ask(1, 2, 3, 9) == 1


def test_choosers_that_know_nothing_of_each_other_agree_on_new_prefixes() -> None:
    prefixes = [(number, number + 1_000) for number in range(20)]
    alone = [Stage().ask(*prefix) for prefix in prefixes]
    busy = Stage()
    together = [busy.ask(*prefix) for prefix in reversed(prefixes)]
    assert alone == together[::-1]
    assert set(alone) == {0, 1, 2, 3}


def test_a_hot_prefix_spreads_before_one_replica_has_too_much_and_stays_where_it_was() -> None:
    stage = Stage()
    counts = Counter(stage.ask(1, 2, 3, 100 + number) for number in range(400))
    assert len(counts) == 4
    assert max(counts.values()) <= BOUND * 100 + SLACK + 1


def test_a_replica_with_a_long_queue_gets_nothing_new() -> None:
    stage = Stage()
    first = stage.ask(1, 2, 3)
    stage.loads[first] = ReplicaLoad(40, 100_000, 1_000, 1_000)
    other = stage.ask(1, 2, 3, 4)
    assert other != first
    stage.loads = [ReplicaLoad(40, 100_000, 1_000, 1_000)] * 4
    assert stage.ask(1, 2, 3, 5) in (first, other), "all queues are long"


def test_a_replica_without_room_is_passed_over_if_another_has_room() -> None:
    stage = Stage()
    first = stage.ask(1, 2, 3)
    stage.loads[first] = ReplicaLoad(4, 0, 2, 1_000)
    other = stage.ask(1, 2, 3, 4, 5, 6)
    assert other != first
    stage.loads = [ReplicaLoad(4, 0, 2, 1_000)] * 4
    assert stage.ask(1, 2, 3, 7, 8, 9) in (first, other), "none has room"


def test_new_prompts_go_to_who_has_little_to_do() -> None:
    stage = Stage(2)
    for short in (True, False):
        stage.loads = [ReplicaLoad(1, 0, 900, 1_000), IDLE]
        assert stage.ask(*(() if short else (77,)), tokens=20) == 1
        stage.loads.reverse()
        assert stage.ask(*(() if short else (78,)), tokens=20) == 0


def test_prompts_of_less_than_a_block_are_spread() -> None:
    stage = Stage()
    counts = Counter(stage.ask(tokens=9) for _ in range(40))
    assert counts == dict.fromkeys(range(4), 10)


def test_what_was_long_ago_does_not_count() -> None:
    stage = Stage(2)
    first = stage.ask(1)
    served = [stage.ask(1) for _ in range(60)]
    assert set(served) == {0, 1}
    stage.clock.time += 20 * HALF_LIFE_S
    stage.chooser.forget(1 - first)
    assert [stage.ask(1) for _ in range(SLACK)] == [first] * SLACK


@pytest.mark.parametrize("able", [[0], [2], [1, 3]])
def test_only_those_that_take_something_are_chosen(able: Sequence[int]) -> None:
    stage = Stage()
    stage.loads = [IDLE if number in able else None for number in range(4)]
    assert {stage.ask(number) for number in range(40)} == set(able)


def test_replicas_keep_the_prefix_hits_of_one_engine_and_share_its_work() -> None:
    trace = Trace(prefixes=64, prefix_tokens=160, requests=1_000)
    one = run(round_robin, 1, 120, trace, speed=4)
    outcome = run(WAYS["prefix and load"], 4, 120, trace)
    assert outcome.hits >= 0.95 * one.hits
    assert outcome.max_requests <= 1.25
    assert outcome.max_computed <= 1.25
