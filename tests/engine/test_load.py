"""The engine's load: blocks that are held but not written, what requests wait for, tokens of each step."""

from __future__ import annotations

import pytest

from benchmarks.kv_waste import measure
from quire.engine.step_stats import StepStats
from quire.foundation.messages.from_engine import STEP_TOKEN_BOUNDS, Deltas, Heartbeat, Load
from quire.foundation.messages.to_engine import ClientHeartbeat
from quire.scheduling.kvcache.cache_groups import FULL_ATTENTION, CacheGroup, Window
from tests.engine.harness import Engine, add
from tests.executor.fake import FakeExecutor


def loads(engine: Engine, count: int) -> list[Load]:
    """Of the next messages with tokens."""
    found: list[Load] = []
    while len(found) < count:
        message = engine.client.receive(0)
        if isinstance(message, Deltas):
            found.append(message.load)
    return found


def test_paging_wastes_less_than_4_percent() -> None:
    waste = measure(requests=120, blocks=2_048)
    assert waste.mean_length > 300
    assert waste.mean_running > 32
    assert 0.005 < waste.mean < 0.04


def test_unwritten_tokens_are_counted_to_the_token() -> None:
    """One request at a time: after each result, all tokens but the one just sampled are written."""
    engine = Engine(max_num_seqs=1)
    engine.client.send(add(1, range(20), 30))
    for sampled, load in enumerate(loads(engine, 10), start=1):
        held, written = (load.num_blocks - load.free_blocks) * load.block_size, 20 + sampled - 1
        assert load.block_size == 16
        assert load.unwritten_tokens == held - written


def test_each_kv_group_has_its_own_blocks() -> None:
    groups = (*FULL_ATTENTION, CacheGroup(reach=Window(64)))
    engine = Engine(FakeExecutor(groups=groups), groups, max_num_seqs=1)
    engine.client.send(add(1, range(20), 30))
    (load,) = loads(engine, 1)
    assert load.unwritten_tokens == 2 * (32 - 20)


def test_host_blocks_that_are_not_ready_are_not_free() -> None:
    engine = Engine(FakeExecutor(num_host_blocks=10, ready_host_blocks=lambda: 4), max_num_seqs=1)
    engine.client.send(add(1, range(20), 30))
    (load,) = loads(engine, 1)
    assert (load.num_host_blocks, load.ready_host_blocks, load.free_host_blocks) == (10, 4, 4)


def test_forks_are_deferred_until_their_prompt_is_there() -> None:
    engine = Engine(max_num_seqs=8, max_num_batched_tokens=16)
    prompt = list(range(40))
    engine.client.send(add(0, [1], 30))  # samples in every step, so every step is reported
    engine.client.send(add(1, prompt, 4, forks=[2, 3]))
    seen = [(load.waiting, load.deferred) for load in loads(engine, 8)]
    assert (2, 2) in seen
    assert seen[-1] == (0, 0)


def test_tokens_of_each_step_are_counted() -> None:
    engine = Engine(max_num_seqs=1, max_num_batched_tokens=64)
    engine.client.send(ClientHeartbeat(0))
    engine.client.send(add(1, range(100), 5))
    beat = None
    for _ in range(60):
        message = engine.client.receive(0)
        beat = message if isinstance(message, Heartbeat) else beat
    assert beat is not None
    counts = dict(zip((*STEP_TOKEN_BOUNDS, None), beat.step_tokens, strict=True))
    assert {bound: count for bound, count in counts.items() if count} == {64: 2, 1: 4}  # 64 + 36, then 4 tokens alone
    assert beat.step_tokens_sum == 104


@pytest.mark.parametrize("tokens", [1, 2, 8, 16_384, 16_385])
def test_a_bucket_holds_what_is_at_most_its_bound(tokens: int) -> None:
    steps = StepStats()
    steps.planned([1] * tokens)
    bounds = (*STEP_TOKEN_BOUNDS, float("inf"))
    index = steps.token_counts.index(1)
    assert (bounds[index - 1] if index else 0) < tokens <= bounds[index]
