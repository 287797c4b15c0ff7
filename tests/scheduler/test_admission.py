"""A request that waits for room is looked up in the prefix cache when more may be found, not at each step."""

from __future__ import annotations

from typing import Any

import pytest

from quire.scheduling.kvcache.block_hashes import BlockHashes
from quire.scheduling.kvcache.block_pool import BlockPool
from tests.engine.harness import add
from tests.scheduler.test_order import LinearCost, Stage


@pytest.fixture
def lookups(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets an entry for each lookup in the prefix cache."""
    done: list[int] = []
    original = BlockPool.get_cached_prefix

    def counted(pool: BlockPool, group: int, hashes: Any) -> Any:
        done.append(group)
        return original(pool, group, hashes)

    monkeypatch.setattr(BlockPool, "get_cached_prefix", counted)
    return done


def cached_blocks(stage: Stage, tokens: list[int]) -> int:
    """How many of a prompt's full blocks are in the prefix cache."""
    pool = stage.scheduler.pool
    hashes = BlockHashes(8).hash_up_to(tokens, len(tokens))
    return sum(pool.get_cached_block((0, block_hash)) is not None for block_hash in hashes)


def test_a_prompt_without_room_is_looked_up_once(lookups: list[int]) -> None:
    stage = Stage(blocks=10, tokens=64)
    stage.scheduler.add(add(1, [1] * 8, 50))
    stage.step()
    stage.scheduler.add(add(2, [2] * 70, 2))
    lookups.clear()
    for _ in range(24):
        stage.step()
    assert len(lookups) == 1
    for _ in stage.steps(until=2):
        pass
    assert stage.ended == [1, 2]


def test_a_prompt_without_time_is_looked_up_once(lookups: list[int]) -> None:
    stage = Stage(tokens=512, blocks=200, cost=LinearCost())
    stage.scheduler.add(add(0, [510], 500))
    stage.step()
    stage.scheduler.add(add(1, [2] * 200, 9))
    stage.step()
    stage.scheduler.add(add(2, [3] * 201, 9, arrival=1.0))
    lookups.clear()
    stage.step()
    stage.step()
    stage.step()
    assert len(lookups) == 1


def test_a_prompt_without_room_does_not_refresh_what_it_would_share() -> None:
    stage = Stage(blocks=12, tokens=64)
    older, newer = [2] * 32, [3] * 24
    for number, prompt in enumerate((older, newer)):
        stage.scheduler.add(add(number, prompt, 1, arrival=float(number)))
        for _ in stage.steps(until=number):
            pass
    assert (cached_blocks(stage, older), cached_blocks(stage, newer)) == (4, 3)
    stage.scheduler.add(add(2, [1] * 8, 70, arrival=2.0))
    stage.step()
    stage.scheduler.add(add(3, [*older, *[9] * 60], 2, arrival=3.0))
    for _ in range(50):
        stage.step()
    assert 0 < cached_blocks(stage, older) < 4, "the older prompt's blocks are taken first"
    assert cached_blocks(stage, newer) == 3
    for _ in stage.steps(until=3):
        pass


def test_a_prompt_without_room_is_admitted_as_soon_as_enough_of_it_is_cached(lookups: list[int]) -> None:
    stage = Stage(blocks=10, tokens=64, threshold=16)
    stage.scheduler.add(add(1, [2] * 64, 30))
    stage.scheduler.add(add(2, [2] * 64 + [3] * 4, 2, arrival=1.0))
    for _ in range(3):
        stage.step()
        assert stage.counts[-1] == {1: 16}
    stage.step()
    assert stage.counts[-1] == {1: 16, 2: 4}, "what the first computes in this step is shared in it"
    assert len(lookups) <= 5


@pytest.mark.parametrize("parent_ends", [False, True])
def test_a_fork_without_room_is_admitted_when_there_is_some(parent_ends: bool) -> None:
    stage = Stage(blocks=12, tokens=128)
    stage.scheduler.add(add(1, [1] * 20, 30))
    stage.scheduler.add(add(2, [2] * 60, 12, arrival=1.0))
    stage.scheduler.add(add(3, [2] * 60, 12, arrival=1.0, fork_of=2))
    stage.step()
    assert stage.counts[-1] == {1: 20, 2: 60}
    for _ in range(4):
        stage.step()
    ended = 2 if parent_ends else 1
    assert stage.scheduler.abort(ended) is not None
    stage.step()
    assert 3 in stage.counts[-1]


def test_a_prompt_needs_less_room_when_another_holds_the_blocks_that_it_shares() -> None:
    stage = Stage(blocks=21, tokens=512, policy="priority")
    prefix = [2] * 80
    stage.scheduler.add(add(0, [*prefix, 3], 1))
    for _ in stage.steps(until=0):
        pass
    assert cached_blocks(stage, prefix) == 10
    stage.scheduler.add(add(1, [1] * 8, 60))
    stage.scheduler.add(add(4, [4] * 44, 60))
    stage.step()
    stage.scheduler.add(add(2, [*prefix, *[9] * 40], 2, priority=5, arrival=1.0))
    stage.step()
    stage.scheduler.add(add(3, [*prefix, 7], 60, arrival=2.0))
    stage.step()
    assert set(stage.counts[-1]) == {1, 3, 4}, "the less urgent one has no room"
    assert stage.scheduler.abort(4) is not None
    stage.step()
    assert set(stage.counts[-1]) == {1, 2, 3}


def test_many_forks_of_a_long_prompt_are_admitted_over_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.scheduling.scheduler.scheduler.ADMITTED_TOKENS", 1_000)
    monkeypatch.setattr("quire.scheduling.scheduler.scheduler._ADMISSION_TOKENS", 0)
    stage = Stage(seqs=64, blocks=2_000, tokens=512)
    message = add(0, [1] * 300, 40, forks=range(1, 33))
    for sequence in message.sequences():
        stage.scheduler.add(sequence)
    admitted = []
    while not stage.ended:
        before = len(stage.scheduler.running)
        stage.step()
        admitted.append(len(stage.scheduler.running) - before)
        assert all(count <= 4 for count in admitted if count > 0)
    assert sum(count for count in admitted if count > 0) == 33, "and all of them run at once"


def test_a_crowd_of_short_prompts_is_admitted_over_several_steps() -> None:
    stage = Stage(seqs=512, blocks=2_000, tokens=8_192)
    for number in range(400):
        stage.scheduler.add(add(number, [1 + number] * 5, 40))
    running = []
    for _ in range(4):
        stage.step()
        running.append(len(stage.scheduler.running))
    assert running == [128, 256, 384, 400]
