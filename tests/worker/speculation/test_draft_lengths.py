"""How many drafts a step has: on machines with known times, never slower than none, and nearly as fast as the best."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from quire.runtime.worker.speculation.draft_lengths import DraftLengths, StepTimes

Milliseconds = Callable[[int], float]
MOST = 4
MACHINES: dict[str, tuple[Milliseconds, Milliseconds]] = {
    # a step of so many tokens, and drafting a token for so many rows
    "bound by memory": (lambda tokens: 4 + 0.2 * tokens, lambda rows: 0.5 + 0.02 * rows),
    "bound by products": (lambda tokens: 0.3 + 0.3 * tokens, lambda rows: 0.1 + 0.03 * rows),
    "slower from the second token on": (lambda tokens: 3.8 if tokens == 1 else 4.4 + 0.25 * tokens, lambda rows: 0.45),
    "drafts for nothing": (lambda tokens: 4 + 0.2 * tokens, lambda rows: 0.01),
}


def tokens_a_ms(machine: str, rows: int, rate: float, steps: int, drafts: int | None = None) -> float:
    """With drafts accepted at this rate, and times that vary; `drafts`: always so many."""
    step_ms, pass_ms = MACHINES[machine]
    rng, lengths, spent, brought = random.Random(rows), DraftLengths(), 0.0, 0
    slots, most = list(range(rows)), np.full(rows, MOST)
    for step in range(steps):
        for slot in slots if step % 50 == 0 else ():
            if rng.random() < 0.3:
                lengths.admit(slot)
        given = lengths.choose(rows, slots, most).drafts if drafts is None else np.full(rows, drafts)
        passes, tokens = int(given.max()), rows + int(given.sum())
        ms = step_ms(tokens) * rng.lognormvariate(0, 0.1)
        drafting_ms = sum(pass_ms(int((given > number).sum())) for number in range(passes)) * rng.lognormvariate(0, 0.1)
        spent += ms + drafting_ms
        for slot, proposed in enumerate(given.tolist()):
            accepted = next((number for number in range(proposed) if rng.random() >= rate), proposed)
            brought += 1 + accepted
            if proposed:
                lengths.found.learn(slot, True, 1)
                lengths.learn_accepted(slot, accepted, proposed)
            else:
                lengths.acceptance.fade(slot)
        if passes:
            lengths.drafting.learn(passes, rows, drafting_ms)
        lengths.learn_step(tokens, ms, asked=bool(passes))
    return brought / spent


@pytest.mark.parametrize("rate", [0.0, 0.6, 0.9])
@pytest.mark.parametrize("rows", [1, 32])
@pytest.mark.parametrize("machine", MACHINES)
def test_it_is_never_slower_and_nearly_as_fast_as_the_best(machine: str, rows: int, rate: float) -> None:
    steps = 1_500 if rows < 32 else 500
    chosen = tokens_a_ms(machine, rows, rate, steps)
    fixed = [tokens_a_ms(machine, rows, rate, 150, drafts) for drafts in range(MOST + 1)]
    assert chosen >= 0.98 * fixed[0]
    assert chosen >= 0.9 * max(fixed)


def test_a_step_that_drafting_has_slowed_down_is_not_what_it_is_held_against() -> None:
    lengths = DraftLengths()
    lengths.learn_step(1, 4.0, asked=False)
    for _ in range(20):
        for ms, asked in ((5.0, True), (7.0, False), (4.0, False), (4.0, False)):
            lengths.learn_step(2 if asked else 1, ms, asked=asked)
    assert [lengths.alone.of(1), lengths.steps.of(2)] == pytest.approx([4, 5])


def test_the_less_drafts_bring_the_more_often_they_are_held_against_none() -> None:
    """Three steps at a time."""

    def without(drafts_ms: float) -> list[int]:
        lengths, found = DraftLengths(), list[int]()
        for _ in range(200):
            lengths.found.learn(0, True, 1)
            lengths.learn_accepted(0, MOST, MOST)
        for step in range(1_000):
            given = int(lengths.choose(1, [0], np.array([MOST])).drafts[0])
            lengths.learn_step(1 + given, drafts_ms if given else 4.0, asked=bool(given))
            if given:
                lengths.drafting.learn(given, 1, 0.1)
            else:
                found.append(step)
        return found

    much, little = without(4.5), without(18.7)
    assert 25 <= len(much) <= 35
    assert 60 <= len(little) <= 120
    assert all(step - 2 in much or step + 2 in much or {step - 1, step + 1} <= {*much} for step in much[1:])


WAIT_MS = 0.3


@pytest.mark.parametrize(("found", "rate"), [(0.0, 0.0), (0.1, 0.6), (1.0, 0.0), (1.0, 0.9)])
@pytest.mark.parametrize("rows", [1, 32])
@pytest.mark.parametrize("machine", MACHINES)
def test_where_asking_for_drafts_takes_time_it_is_never_slower(
    machine: str, rows: int, found: float, rate: float
) -> None:
    """On a device that runs ahead, a step that asks waits for all results, though nothing may be found."""
    step_ms, pass_ms = MACHINES[machine]
    rng, lengths, spent, brought = random.Random(rows), DraftLengths(waits=True), 0.0, 0
    slots, most, told = list(range(rows)), np.full(rows, MOST), 0
    for step in range(3_000 if rows < 32 else 1_500):
        given = np.zeros(rows, dtype=np.int64)
        if step < told:
            lengths.skip()
        else:
            given = lengths.choose(rows, slots, most).drafts
            told = step + 1 + lengths.resting
        asked = bool(given.any())
        for slot in slots if asked else ():
            lucky = rng.random() < found
            lengths.found.learn(slot, lucky, 1)
            given[slot] *= lucky
        tokens, passes = rows + int(given.sum()), int(given.max())
        ms = (step_ms(tokens) + WAIT_MS * asked) * rng.lognormvariate(0, 0.1)
        drafting_ms = sum(pass_ms(int((given > number).sum())) for number in range(passes))
        spent += ms + drafting_ms
        for slot, proposed in enumerate(given.tolist()):
            accepted = next((number for number in range(proposed) if rng.random() >= rate), proposed)
            brought += 1 + accepted
            if proposed:
                lengths.learn_accepted(slot, accepted, proposed)
        if passes:
            lengths.drafting.learn(passes, rows, drafting_ms)
        lengths.learn_step(tokens, ms, asked=asked)
    alone = rows / step_ms(rows)
    assert brought / spent >= 0.98 * alone
    if (machine, rows, rate) == ("bound by memory", 1, 0.9):
        assert brought / spent > 1.5 * alone


@pytest.mark.parametrize("rate", [0.0, 0.5, 0.8])
@pytest.mark.parametrize(("first_ms", "draft_ms"), [(0.9, 0.04), (0.9, 0.3), (0.2, 0.04)])
def test_what_the_first_of_several_steps_with_drafts_takes_longer_is_no_obstacle(
    first_ms: float, draft_ms: float, rate: float
) -> None:
    """A device that drafts: a step behind one without drafts waits for the host, those that follow do not."""
    rng, lengths, spent, brought = random.Random(1), DraftLengths(waits=True, settles=True), 0.0, 0
    told, before = 0, False

    def ms_of(drafts: int) -> float:
        return 0.25 + 0.05 * bool(drafts) + draft_ms * drafts

    for step in range(8_000):
        given = 0
        if step < told:
            lengths.skip()
        else:
            given = int(lengths.choose(1, [0], np.array([MOST])).drafts[0])
            told = step + 1 + lengths.resting
        accepted = next((number for number in range(given) if rng.random() >= rate), given)
        ms = (ms_of(given) + first_ms * (given > 0 and not before)) * rng.lognormvariate(0, 0.1)
        spent, brought, before = spent + ms, brought + 1 + accepted, given > 0
        if given:
            lengths.found.learn(0, True, 1)
            lengths.learn_accepted(0, accepted, given)
        lengths.learn_step(1 + given, ms, asked=given > 0)
    fixed = [sum(rate**number for number in range(1 + drafts)) / ms_of(drafts) for drafts in range(1 + MOST)]
    assert brought / spent >= 0.98 * fixed[0]
    if max(fixed) > 1.3 * fixed[0]:
        assert brought / spent >= 0.9 * max(fixed)


def test_drafts_come_back_when_they_pay_again() -> None:
    lengths = DraftLengths()

    def run(steps: int, rate: float, seed: int) -> int:
        rng, drafted = random.Random(seed), 0
        for _ in range(steps):
            given = int(lengths.choose(1, [0], np.array([MOST])).drafts[0])
            lengths.steps.learn(1 + given, 4 + 0.2 * given)
            if given:
                drafted += 1
                lengths.drafting.learn(given, 1, 0.5 * given)
                lengths.found.learn(0, True, 1)
                accepted = next((number for number in range(given) if rng.random() >= rate), given)
                lengths.learn_accepted(0, accepted, given)
        return drafted

    assert run(200, 0.9, 1) > 190
    assert run(1_000, 0.0, 2) < 100
    assert run(3_000, 0.9, 3) > 1_500


def test_one_row_is_given_what_pays_for_it() -> None:
    """Beside seven that are always right, one that is always wrong."""
    lengths = DraftLengths()
    for _ in range(200):
        for slot in range(8):
            lengths.learn_accepted(slot, MOST if slot else 0, MOST)
        for tokens in (8, 16, 40):
            lengths.steps.learn(tokens, 4 + 0.1 * tokens)
        lengths.drafting.learn(MOST, 8, 0.8)
    for _ in range(20):
        given = lengths.choose(8, list(range(8)), np.full(8, MOST)).drafts.tolist()
    assert given[1:] == [MOST] * 7
    assert given[0] <= 1


def test_times_between_measured_sizes_lie_on_a_line() -> None:
    times = StepTimes()
    assert not times
    assert times.of(3) == 0
    for _ in range(50):
        times.learn(2, 4.0)
        times.learn(6, 8.0)
    assert [times.of(tokens) for tokens in (2, 4, 6)] == pytest.approx([4, 6, 8])
    assert times.of(1) < 4 < 8 < times.of(12)
    times.learn(6, 800.0)  # the machine stood still
    assert times.of(6) == pytest.approx(8.4)
