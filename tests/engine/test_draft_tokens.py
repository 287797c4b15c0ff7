"""Draft tokens: a step may gain fewer tokens than planned, or several; outputs, ends and blocks are the same."""

from __future__ import annotations

import random

import pytest

from quire.foundation.messages.to_engine import Abort
from quire.sampling_params import RepetitionDetectionParams
from quire.scheduling.kvcache.cache_groups import FULL, CacheGroup, Chunk, Reach, Window
from tests.engine.harness import Engine, add, alone
from tests.executor.fake import FakeExecutor

PROMPT = [5, 6, 7]


def drafting(drafts: int) -> dict[str, object]:
    return {"extra_args": {"drafts": drafts}}


@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize(("reaches", "block_size"), [((FULL,), 8), ((FULL,), 1), ((FULL, Window(20), Chunk(24)), 4)])
def test_whatever_is_accepted_each_request_gets_what_it_gets_alone(
    max_in_flight: int, mode: str, reaches: tuple[Reach, ...], block_size: int
) -> None:
    """Random gains of 0 to 6, forks, stops, aborts, shared prefixes, and too few blocks for all."""
    rng = random.Random(max_in_flight)
    groups = [CacheGroup(reach=reach) for reach in reaches]
    num_blocks = 100 * len(groups) // block_size
    executor = FakeExecutor(
        num_blocks, block_size, groups=groups, num_host_blocks=num_blocks if mode == "swap" else 0,
        accept=lambda most: rng.randint(0, most), max_in_flight=max_in_flight,
    )  # fmt: skip
    engine = Engine(
        executor, groups, block_size=block_size, max_num_seqs=5, max_model_len=90, preemption_mode=mode
    )  # fmt: skip
    stem = [rng.randrange(512) for _ in range(30)]
    adds, expected = [], {}
    for number in range(0, 40, 2):
        prompt = stem[: rng.randint(0, 30)] + [rng.randrange(512) for _ in range(rng.randint(1, 9))]
        free = alone(prompt, 40)
        stop = [free[rng.randrange(40)]] if rng.random() < 0.4 else []
        drafts = {"extra_args": {"drafts": rng.randint(0, 6)}}
        adds.append(add(number, prompt, 40, stop_ids=stop, forks=[number + 1], logprobs=2, **drafts))
        expected[number] = expected[number + 1] = alone(prompt, 40, stop)
    aborted = {3, 8, 21}
    for message in adds:
        engine.client.send(message)
        if rng.random() < 0.5:
            engine.step()
    for _ in range(30):
        engine.step()
    engine.client.send(Abort(sorted(aborted)))
    outcome = engine.run([])
    while len(outcome.ends) < len(expected):
        engine.step()
    engine.finish_steps()
    for number, tokens in expected.items():
        got = outcome.tokens.get(number, [])
        if outcome.ends[number].reason == "abort":
            assert number in aborted
            assert got == tokens[: len(got)]
        else:
            assert got == tokens, number
            assert sum(entry is not None for entry in outcome.logprobs[number]) == len(tokens)
    assert engine.client.counts()["preemptions"] > 0
    engine.assert_all_free()


def test_several_tokens_come_at_once_and_take_fewer_steps() -> None:
    def steps(drafts: int) -> int:
        planned: list[int] = []
        executor = FakeExecutor(fault=lambda point, step: planned.append(step) if point == "submit" else None)
        outcome = Engine(executor).run([add(1, PROMPT, 49, **drafting(drafts))])
        assert outcome.tokens[1] == alone(PROMPT, 49)
        assert outcome.ends[1].reason == "length"
        return len(planned)

    assert steps(0) == 49
    assert steps(5) == 1 + 48 / 6


@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
@pytest.mark.parametrize("last", range(8))
def test_a_stop_token_among_accepted_tokens_ends_there(last: int, max_in_flight: int) -> None:
    free = alone(PROMPT, 60)
    stop = free[8 + last]
    engine = Engine(FakeExecutor(max_in_flight=max_in_flight))
    outcome = engine.run([add(1, PROMPT, 60, stop_ids=[stop], logprobs=0, **drafting(7))])
    assert outcome.tokens[1] == free[: free.index(stop) + 1]
    assert len(outcome.logprobs[1]) == len(outcome.tokens[1])
    assert outcome.ends[1].reason == "stop"
    engine.assert_all_free()


def test_min_tokens_count_accepted_tokens_one_by_one() -> None:
    free = alone(PROMPT, 60)
    assert len(set(free[:8])) == 8
    wanted = {"stop_ids": [free[2], free[5]], "min_tokens": 4, **drafting(9)}
    outcome = Engine().run([add(1, PROMPT, 60, **wanted)])
    assert outcome.tokens[1] == free[:6]


@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_accepted_tokens_never_exceed_max_tokens(max_tokens: int) -> None:
    engine = Engine()
    outcome = engine.run([add(1, PROMPT, max_tokens, **drafting(4))])
    assert outcome.tokens[1] == alone(PROMPT, max_tokens)
    assert outcome.ends[1].reason == "length"
    engine.assert_all_free()


def test_a_repetition_among_accepted_tokens_ends_there() -> None:
    executor = FakeExecutor(sample=lambda history, num_sampled, vocab: [9, 8, 7][num_sampled % 3])
    asked = RepetitionDetectionParams(max_pattern_size=3)
    outcome = Engine(executor).run([add(1, PROMPT, 60, repetition_detection=asked, **drafting(30))])
    assert outcome.tokens[1] == [9, 8, 7] * 2
    assert outcome.ends[1].reason == "repetition"


def test_blocks_of_rejected_drafts_are_freed_when_the_result_is_processed() -> None:
    executor = FakeExecutor(num_blocks=64, block_size=1, accept=lambda most: 1, max_in_flight=2)
    engine = Engine(executor, block_size=1)
    engine.client.send(add(1, PROMPT, 40, **drafting(10)))
    for _ in range(6):
        engine.step()
    tokens = len(PROMPT) + len(engine.outcome.tokens[1])
    held = 64 - engine.client.counts()["free_blocks"]
    assert held <= tokens + 11 + 1, "more than one plan in flight and the next token may need"
    engine.run([])
    while 1 not in engine.outcome.ends:
        engine.step()
    engine.finish_steps()
    assert engine.outcome.tokens[1] == alone(PROMPT, 40)
    engine.assert_all_free()


def test_only_accepted_tokens_are_found_in_the_prefix_cache() -> None:
    """Blocks that hold rejected drafts are not found in the prefix cache; accepted tokens are."""
    executor = FakeExecutor(num_blocks=64, block_size=4, accept=lambda most: min(most, 2))
    engine = Engine(executor, block_size=4)
    free = alone(PROMPT, 22)
    outcome = engine.run([add(1, PROMPT, 22, **drafting(6))])
    again = [*PROMPT, *free, 1]
    outcome = engine.run([add(2, again, 20, **drafting(6))])
    assert outcome.tokens[2] == alone(again, 20)
    assert outcome.ends[2].cached_tokens == (len(PROMPT) + 22 - 1) // 4 * 4


def test_a_row_that_gains_nothing_is_planned_again() -> None:
    gains = iter([0, 0, 1, 0, 1, 0, 0, 0, 1, 1, 1])
    engine = Engine(FakeExecutor(block_size=1, accept=lambda most: next(gains, 1)), block_size=1)
    outcome = engine.run([add(1, PROMPT, 12)])
    assert outcome.tokens[1] == alone(PROMPT, 12)
    engine.assert_all_free()


def test_drafts_preempt_nobody_and_give_way_to_waiting_requests() -> None:
    """Two requests fill the pool to the last block; their drafts take what is left of it and no more."""
    executor = FakeExecutor(num_blocks=10, block_size=4, accept=lambda most: 1)
    engine = Engine(executor, block_size=4)
    outcome = engine.run([add(number, [number] * 4, 16, **drafting(12)) for number in (1, 2)])
    assert outcome.tokens == {number: alone([number] * 4, 16) for number in (1, 2)}
    assert engine.client.counts()["preemptions"] == 0
