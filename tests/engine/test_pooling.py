"""Pooled requests through the engine: they make no tokens, and each ends with the vector that it would have alone."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from quire.foundation.messages.from_engine import End, PoolingInfo
from quire.foundation.messages.to_engine import Abort, Add
from quire.foundation.messages.workers import Plan
from quire.pooling_params import PoolingParams
from tests.engine.harness import Engine, add, alone, pooled
from tests.executor.fake import FakeExecutor
from tests.executor.fake_pooling import CLASSIFIES, EMBEDS, fake_vector

EMBED = PoolingParams(task="embed")
TOKENS = PoolingParams(task="token_embed")
BOTH = PoolingInfo(["embed", "token_embed"], generates=True, dim=16)


def never(params: PoolingParams) -> bool:
    return False


def embeds_from_cache(params: PoolingParams) -> bool:
    return params.task == "embed"


def engine(
    pooling: PoolingInfo = EMBEDS,
    from_cache: Callable[[PoolingParams], bool] = never,
    whole_texts: bool = False,
    num_blocks: int = 64,
    **settings: object,
) -> Engine:
    executor = FakeExecutor(num_blocks=num_blocks, pooling=pooling, pools_from_cache=from_cache)
    return Engine(
        executor, pooling=pooling, pools_from_cache=from_cache, whole_texts=whole_texts, drafts=None, **settings
    )


def text(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(512), k=length)


def assert_vector(end: End, tokens: Sequence[int], params: PoolingParams, skip: int = 0, types: bytes = b"") -> None:
    """A sequence ended with the vector that the fake model makes of its text."""
    assert end.reason == "stop", end
    found = np.frombuffer(end.vector, dtype="<f4").reshape(end.vector_shape)
    expected = fake_vector(tokens, params, EMBEDS, skip, types)
    if params.per_token:
        rows = [fake_vector(tokens[: i + 1], params, EMBEDS, 0, types[: i + 1]) for i in range(len(tokens))]
        expected = np.stack(rows)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("params", [EMBED, TOKENS, PoolingParams(task="embed", dimensions=4)])
def test_chunks_of_long_texts_make_one_vector(params: PoolingParams) -> None:
    tests = engine(max_num_batched_tokens=32)
    texts = [text(length, length) for length in (1, 7, 31, 32, 33, 100, 250)]
    outcome = tests.run([pooled(number, each, params) for number, each in enumerate(texts)])
    for number, each in enumerate(texts):
        assert_vector(outcome.ends[number], each, params)
        assert number not in outcome.tokens
    tests.assert_all_free()


def test_prompts_and_token_types_reach_the_worker_in_chunks() -> None:
    tests = engine(max_num_batched_tokens=32)
    types = bytes([0] * 40 + [1] * 30)
    adds = [
        pooled(1, text(70), EMBED, prompt_skip=45),
        pooled(2, text(70), EMBED, token_types=types),
        pooled(3, text(20), EMBED),
    ]
    outcome = tests.run(adds)
    assert_vector(outcome.ends[1], text(70), EMBED, skip=45)
    assert_vector(outcome.ends[2], text(70), EMBED, types=types)
    assert_vector(outcome.ends[3], text(20), EMBED)


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
@pytest.mark.parametrize("steps", [2, 4, 7])
def test_texts_that_are_preempted_are_pooled_from_their_beginning(preemption: str, steps: int) -> None:
    """Whatever of them was pooled, and whatever steps in flight bring: another sequence has the slot since."""
    executor = FakeExecutor(num_blocks=12, num_host_blocks=64, pooling=BOTH)
    tests = Engine(
        executor, pooling=BOTH, drafts=None, max_num_batched_tokens=16, max_num_seqs=1, scheduling_policy="priority",
        preemption_mode=preemption,
    )  # fmt: skip
    for number, params in enumerate((EMBED, TOKENS)):
        tests.client.send(pooled(number, text(150), params, priority=2))
        for _ in range(steps):
            tests.step()
        assert number not in tests.outcome.ends
        outcome = tests.run([add(10 + number, text(60, 1), 20, priority=1)])
        assert outcome.tokens[10 + number] == alone(text(60, 1), 20)
        while number not in tests.outcome.ends:
            tests.step()
        assert_vector(outcome.ends[number], text(150), params)
        assert outcome.ends[number].preemptions == 1
    tests.assert_all_free()


def test_only_vectors_of_the_last_token_use_the_prefix_cache() -> None:
    common = text(64)
    cached = {}
    for from_cache in (False, True):
        tests = engine(BOTH, embeds_from_cache if from_cache else never)
        tests.run([add(1, common, 4)])
        outcome = tests.run([pooled(2, [*common, 1, 2], EMBED), pooled(3, [*common, 1, 2], TOKENS)])
        no_cache = PoolingParams(task="embed", skip_reading_prefix_cache=True)
        outcome = tests.run([pooled(4, [*common, 1, 2], no_cache)])
        assert_vector(outcome.ends[2], [*common, 1, 2], EMBED)
        assert_vector(outcome.ends[3], [*common, 1, 2], TOKENS)
        cached[from_cache] = [outcome.ends[number].cached_tokens for number in (2, 3, 4)]
    assert cached == {False: [0, 0, 0], True: [64, 0, 0]}


def test_whole_texts_are_never_cut() -> None:
    chunks: list[int] = []

    class Noting(FakeExecutor):
        def submit(self, plan: Plan) -> None:
            chunks.extend(plan.counts)
            super().submit(plan)

    tests = Engine(
        Noting(pooling=EMBEDS),
        pooling=EMBEDS,
        whole_texts=True,
        max_num_batched_tokens=128,
        long_prefill_token_threshold=16,
    )
    texts = [text(length, length) for length in (100, 90, 20, 128, 5, 60)]
    outcome = tests.run([pooled(number, each, EMBED) for number, each in enumerate(texts)])
    assert sorted(chunks) == sorted(map(len, texts))
    for number, each in enumerate(texts):
        assert_vector(outcome.ends[number], each, EMBED)


@pytest.mark.parametrize("params", [EMBED, TOKENS])
def test_aborts_and_deadlines_end_pooled_requests(params: PoolingParams) -> None:
    """Without vectors: those of the chunks that were computed are not the text's."""
    tests = engine(max_num_batched_tokens=16)
    tests.client.send(pooled(1, text(200), params))
    tests.client.send(pooled(2, text(200), params, deadline=0.0))
    for _ in range(4):
        tests.step()
    tests.client.send(Abort([1]))
    outcome = tests.run([pooled(3, text(50), EMBED)])
    tests.finish_steps()
    assert (outcome.ends[1].reason, outcome.ends[2].reason) == ("abort", "timeout")
    for end in (outcome.ends[1], outcome.ends[2]):
        assert (end.vector, end.vector_shape) == (b"", [])
    assert_vector(outcome.ends[3], text(50), EMBED)
    tests.assert_all_free()


def test_priorities_order_pooled_requests() -> None:
    tests = engine(max_num_seqs=1, scheduling_policy="priority")
    outcome = tests.run([pooled(number, text(40, number), EMBED, priority=9 - number) for number in range(4)])
    assert list(outcome.ends) == [3, 2, 1, 0]


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (pooled(1, text(9), PoolingParams(task="classify")), "does not serve"),
        (pooled(1, text(9), EMBED, prompt_skip=9), "nothing to pool"),
        (pooled(1, text(9), EMBED, token_types=b"\1"), "another length"),
        (pooled(1, text(600), EMBED), "exceeds the 512 tokens"),
        (pooled(1, [], EMBED), "empty"),
        (pooled(1, [1, 512], EMBED), r"must be in \[0, 512\)"),
        (add(1, text(9), 4), "generates no text"),
    ],
)
def test_what_cannot_be_pooled_is_refused(message: Add, why: str) -> None:
    tests = engine()
    tests.client.send(message)
    tests.step()
    assert tests.outcome.ends[1].reason == "error"
    assert re.search(why, tests.outcome.ends[1].message), tests.outcome.ends[1].message
    tests.assert_all_free()


def test_labels_are_values_of_the_task() -> None:
    tests = engine(CLASSIFIES)
    outcome = tests.run([pooled(1, text(9), PoolingParams(task="classify"))])
    assert outcome.ends[1].vector_shape == [3]
