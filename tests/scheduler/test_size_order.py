"""Small and large requests of one tenant take turns."""

from __future__ import annotations

import pytest

from quire.scheduling.scheduler.tenant_queue import SMALL, size_of
from tests.engine.harness import add
from tests.scheduler.test_order import Stage

LARGE = {"blocks": 4_096, "tokens": 20_000}
LONG, SHORT = 3_000, 500


def run(stage: Stage, count: int) -> None:
    """Until so many have ended."""
    for _ in range(5_000):
        if len(stage.ended) >= count:
            return
        stage.step()
    raise AssertionError(f"{len(stage.ended)} requests have ended, not {count}")


def crowd(stage: Stage, count: int, first: int = 0) -> None:
    for number in range(first, first + count):
        stage.scheduler.add(add(number, [number % 512] * LONG, 1))


@pytest.mark.parametrize(
    ("tokens", "size"),
    [(1, 0), (SMALL, 0), (SMALL + 1, 1), (4 * SMALL, 1), (4 * SMALL + 1, 2), (131_072, 4), (2**20, 5)],
)
def test_a_size_is_four_times_the_one_before(tokens: int, size: int) -> None:
    assert size_of(tokens) == size


def test_a_crowd_of_long_prompts_keeps_no_short_request_waiting() -> None:
    stage = Stage(seqs=1, **LARGE)
    crowd(stage, 30)
    stage.step()
    stage.scheduler.add(add(100, [1] * SHORT, 1, arrival=9.0))
    run(stage, 31)
    assert stage.ended.index(100) <= 2


def test_short_requests_without_end_leave_long_ones_their_share() -> None:
    stage = Stage(seqs=1, **LARGE)
    crowd(stage, 20)
    short = 0
    for _ in range(100):
        while short - sum(ended >= 100 for ended in stage.ended) < 3:
            stage.scheduler.add(add(100 + short, [short % 512] * SHORT, 1, arrival=float(short)))
            short += 1
        stage.step()
    served = sum(LONG if ended < 20 else SHORT for ended in stage.ended)
    assert len(stage.ended) > 90
    assert 0.4 < LONG * sum(ended < 20 for ended in stage.ended) / served < 0.6


def test_a_size_that_nobody_waited_in_saves_nothing_up() -> None:
    stage = Stage(seqs=1, **LARGE)
    crowd(stage, 20)
    run(stage, 10)
    for number in range(100, 160):
        stage.scheduler.add(add(number, [number % 512] * SHORT, 1, arrival=9.0))
    run(stage, 10 + 2 * (1 + LONG // SHORT))
    assert sum(ended < 20 for ended in stage.ended[10:]) >= 2


def test_short_requests_that_come_one_by_one_do_not_starve_long_ones() -> None:
    """The size of the short ones is empty whenever one of them is admitted."""
    stage = Stage(seqs=1, **LARGE)
    crowd(stage, 3)
    stage.step()
    for number in range(100, 140):
        stage.scheduler.add(add(number, [number % 512] * SHORT, 1, arrival=float(number)))
        stage.step()
    assert {0, 1, 2} <= set(stage.ended)


def test_choices_of_a_long_prompt_wait_behind_it_and_not_before_short_requests() -> None:
    stage = Stage(seqs=1, **LARGE)
    crowd(stage, 2)
    stage.step()
    for number in range(10, 60):
        stage.scheduler.add(add(number, [1] * LONG, 1, fork_of=1))
    waiting = stage.scheduler._waiting
    assert waiting.first is not None
    assert waiting.first.id == 1, "nobody has to skip its choices"
    stage.scheduler.add(add(100, [1] * SHORT, 1, arrival=9.0))
    run(stage, 53)
    assert stage.ended.index(100) <= 2


# --- a large request that finds no room -----------------------------------------------------------------------------


def full_stage() -> Stage:
    """A running request leaves no blocks for another one as large, but for small ones."""
    stage = Stage(seqs=8, blocks=400, tokens=4_000)
    stage.scheduler.add(add(0, [1] * 2_500, 60))
    stage.step()
    stage.scheduler.add(add(1, [2] * 2_500, 1))
    stage.step()
    assert (len(stage.scheduler.running), len(stage.scheduler.waiting)) == (1, 1)
    return stage


@pytest.mark.parametrize("tenant", ["", "another"])
def test_small_requests_pass_a_large_one_that_finds_no_blocks(tenant: str) -> None:
    stage = full_stage()
    stage.scheduler.add(add(10, [3] * 50, 3, arrival=9.0, tenant=tenant))
    for _ in range(6):
        stage.step()
    assert stage.ended == [10]
    assert len(stage.scheduler.waiting) == 1


@pytest.mark.parametrize("tenants", [("", ""), ("a", "b"), ("", "a")])
def test_they_pass_until_they_have_cost_as_much(tenants: tuple[str, str]) -> None:
    stage = full_stage()
    for number in range(10, 110):
        stage.scheduler.add(add(number, [number] * 200, 4, arrival=9.0, tenant=tenants[number % 2]))
    for _ in stage.steps(until=1):
        pass
    passed = 204 * len([number for number in stage.ended if number >= 10])
    turns = 1 if tenants == ("", "") else 3  # other tenants have their own turns besides
    assert 2_000 < passed < turns * 2_501 + 3 * 204, "the last one may pass when little is left; some run beside it"
    assert stage.ended.index(1) <= stage.ended.index(0) + 4


def test_what_has_passed_is_forgotten_with_the_request() -> None:
    stage = full_stage()
    for number in range(10, 30):
        stage.scheduler.add(add(number, [number] * 200, 4, arrival=9.0))
    for _ in range(10):
        stage.step()
    order = stage.scheduler._waiting
    assert order._passed.keys() == {1}
    stage.scheduler.abort(1)
    assert not order._passed
    while stage.scheduler.has_work:
        stage.step()
    assert not order._passed


def test_a_prompt_of_very_many_choices_keeps_no_short_request_waiting() -> None:
    stage = Stage(seqs=8, **LARGE)
    for sequence in add(0, [1] * SHORT, 100, forks=range(1, 200)).sequences():
        stage.scheduler.add(sequence)
    stage.step()
    stage.step()
    stage.scheduler.add(add(500, [2] * SHORT, 10, arrival=9.0))
    run(stage, 12)
    assert 500 in stage.ended, "the first slots that become free are shared"


def test_the_other_choices_of_a_prompt_find_slots_when_it_is_computed() -> None:
    """However many that came later could have been admitted one step before."""
    stage = Stage(seqs=8, blocks=64, tokens=64)
    for sequence in add(0, [1] * 20, 5, forks=[1, 2]).sequences():
        stage.scheduler.add(sequence)
    for number in range(10, 20):
        stage.scheduler.add(add(number, [number] * 2, 30, arrival=1.0))
    stage.step()
    assert stage.counts[-1] == {0: 20} | dict.fromkeys(range(10, 15), 2), "two slots are held"
    stage.step()
    assert {0, 1, 2} < stage.counts[-1].keys()
    assert len(stage.counts[-1]) == 8
