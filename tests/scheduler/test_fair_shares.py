"""Tenants are served in turn, by tokens: nobody's flood keeps others waiting."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from quire.foundation.messages.from_engine import EXPECTED_OUTPUT
from quire.scheduling.scheduler.waiting_queue import QUANTUM
from tests.engine.harness import add
from tests.scheduler.test_order import Stage

LARGE = {"blocks": 4_096, "tokens": 20_000}


def admitted(stage: Stage) -> list[int]:
    """Requests in the order of their first step."""
    order: dict[int, None] = {}
    for counts in stage.counts:
        order |= dict.fromkeys(counts)
    return list(order)


def run(stage: Stage, count: int) -> None:
    """Until so many have ended."""
    for _ in range(5_000):
        if len(stage.ended) >= count:
            return
        stage.step()
    raise AssertionError(f"{len(stage.ended)} requests have ended, not {count}")


def test_a_flood_does_not_keep_another_tenant_waiting() -> None:
    stage = Stage(seqs=1, **LARGE)
    for number in range(200):
        stage.scheduler.add(add(number, [number] * 1_000, 1, tenant="flood"))
    stage.step()
    for number in range(1_000, 1_003):
        stage.scheduler.add(add(number, [number % 512] * 1_000, 1, arrival=9.0, tenant="light"))
    run(stage, 20)
    places = [admitted(stage).index(number) for number in range(1_000, 1_003)]
    assert places[0] <= 3
    assert places[2] <= places[0] + 4, "in turns with the flood's"


@pytest.mark.parametrize("sizes", [(100, 1_000), (50, 6_000), (3_000, 20)])
def test_tenants_are_admitted_equally_many_tokens(sizes: tuple[int, int]) -> None:
    stage, rng, costs = Stage(seqs=1, **LARGE), random.Random(0), {}
    for number in range(400):
        tenant = number % 2
        tokens = rng.randint(sizes[tenant] // 2, sizes[tenant] * 3 // 2)
        costs[number] = tenant, tokens + 1
        stage.scheduler.add(add(number, [rng.randrange(512) for _ in range(tokens)], 1, tenant=str(tenant)))
    totals: Counter[int] = Counter()
    by_tenant = {0: 200, 1: 200}
    step = 0
    while all(by_tenant.values()):
        stage.step()
        for number in set(stage.ended[step:]):
            tenant, cost = costs[number]
            totals[tenant] += cost
            by_tenant[tenant] -= 1
        step = len(stage.ended)
    assert abs(totals[0] - totals[1]) <= 2 * QUANTUM + max(sizes) * 3 // 2


def test_requests_of_one_tenant_and_one_size_are_served_by_arrival() -> None:
    stage = Stage(seqs=1, **LARGE)
    arrivals = random.Random(1).sample(range(100), 30)
    for number, arrival in enumerate(arrivals):
        stage.scheduler.add(add(number, [number] * (30 * number + 1), 2, arrival=float(arrival), tenant="a"))
    run(stage, 30)
    assert stage.ended == sorted(range(30), key=lambda number: arrivals[number])


def test_a_request_that_costs_many_turns_is_served_all_the_same() -> None:
    stage = Stage(seqs=1, **LARGE)
    stage.scheduler.add(add(0, [1] * 19_000, 1, tenant="a"))
    for number in range(1, 100):
        stage.scheduler.add(add(number, [number] * 500, 1, tenant="b"))
    run(stage, 100)
    assert 19_000 / 501 - 9 <= stage.ended.index(0) <= 19_000 / 501 + 9


def test_an_idle_tenant_saves_nothing_up() -> None:
    stage = Stage(seqs=1, **LARGE)
    stage.scheduler.add(add(0, [1] * 10, 1, tenant="a"))
    run(stage, 1)
    for number in range(1, 60):
        stage.scheduler.add(add(number, [number] * 500, 1, tenant="b"))
    run(stage, 30)
    for number in range(100, 160):
        stage.scheduler.add(add(number, [number] * 500, 1, tenant="a"))
    run(stage, 54)
    of_a = sum(number >= 100 for number in stage.ended[30:54])
    assert 8 <= of_a <= 16


def test_who_was_admitted_last_is_preempted_first_and_resumed_first() -> None:
    """Not who came last: beside a flood that would always be the other tenant."""
    stage = Stage(seqs=2, blocks=12, tokens=200)
    stage.scheduler.add(add(100, [9] * 20, 60, arrival=5.0, tenant="light"))
    stage.step()
    for number in range(3):
        stage.scheduler.add(add(number, [number] * 20, 60, tenant="flood"))
    preempted: set[int] = set()
    for _ in stage.steps(until=100):
        preempted |= {request.id for request in stage.scheduler.requests() if request.preemptions}
    assert preempted == {0}
    stage.step()
    assert 0 in stage.counts[-1], "before those that have never run"


def test_tenants_come_and_go_without_a_trace() -> None:
    stage, rng = Stage(seqs=2, blocks=64, tokens=40), random.Random(2)
    alive: set[int] = set()
    for number in range(400):
        fork_of = number - 1 if number % 5 == 4 and number - 1 in alive else None
        stage.scheduler.add(
            add(number, [number // 5 % 512] * 20, rng.randint(1, 6), tenant=str(rng.randrange(9)), fork_of=fork_of)
        )
        alive.add(number)
        if rng.random() < 0.3:
            stage.scheduler.abort(victim := rng.choice(sorted(alive)))
            stage.ended.append(victim)
        if rng.random() < 0.5:
            stage.step()
        alive -= set(stage.ended)
    while stage.scheduler.has_work:
        stage.step()
    order = stage.scheduler._waiting
    assert not order._tenants
    assert not order._turns
    assert len(order._without_turns) == 0
    assert stage.scheduler.waiting.queued_tokens == 0


def test_many_tenants_cost_no_more_than_one_turn_each() -> None:
    stage = Stage(seqs=1, **LARGE)
    for number in range(300):
        stage.scheduler.add(add(number, [number % 512] * 15_000, 1, tenant=str(number)))
    assert stage.scheduler._waiting.first is not None
    assert max(tenant.deficit for tenant in stage.scheduler._waiting._turns) < 15_000 + EXPECTED_OUTPUT + 3 * QUANTUM
