"""States of sequences and their checkpoints: what is shared is right, and wrong states are found."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import count
from typing import Any

import pytest

from quire.scheduling.kvcache.block_pool import BlockPool
from quire.scheduling.kvcache.block_table import BlockTable
from quire.scheduling.kvcache.cache_groups import FULL_ATTENTION, CacheGroup
from quire.scheduling.scheduler.request import Request
from quire.scheduling.scheduler.sequence_states import SequenceStates
from quire.scheduling.scheduler.step import Step
from tests.engine.harness import Engine, add
from tests.equivalence.conversations import Conversations, counted_hits
from tests.executor.fake import FakeExecutor, hash_token, next_state, state_of, stateful_counter

VOCABULARY = 512
BLOCK = 8
ROWS = 4


def alone(prompt: Sequence[int], most: int, groups: Sequence[CacheGroup] = FULL_ATTENTION) -> list[int]:
    """What the fake model with states answers."""
    history, state = list(prompt), state_of(prompt)
    for drawn in range(most):
        history.append(hash_token(history if groups else [], stateful_counter(drawn, state), VOCABULARY))
        state = next_state(state, history[-1])
    return history[len(prompt) :]


def engine_with(
    num_states: int,
    blocks: int = 200,
    groups: Sequence[CacheGroup] = FULL_ATTENTION,
    host: int = 0,
    drafts: int = 0,
    **settings: Any,
) -> Engine:
    """An engine of the fake model, which accepts each row's drafts up to a random one."""
    luck = random.Random(drafts)
    executor = FakeExecutor(
        blocks, BLOCK, groups=groups, num_host_blocks=host, num_states=num_states,
        accept=lambda most: luck.randint(1, most),
    )  # fmt: skip
    settings = {"mamba_block_size": 2 * BLOCK, "max_num_seqs": ROWS, "max_num_batched_tokens": 40} | settings
    asked = (lambda sampling: drafts) if drafts else None
    return Engine(executor, groups, drafts=asked, block_size=BLOCK, **settings)


def hold(seed: int, engine: Engine, groups: Sequence[CacheGroup] = FULL_ATTENTION, rounds: int = 25) -> None:
    script = Conversations(random.Random(seed), engine, lambda p, n: alone(p, n, groups), VOCABULARY, 300)
    script.hold(rounds)


@pytest.mark.parametrize("groups", [FULL_ATTENTION, ()], ids=["attention", "states alone"])
@pytest.mark.parametrize("drafts", [0, 3, 16])
def test_conversations_share_nearly_all_that_is_cached(groups: Sequence[CacheGroup], drafts: int) -> None:
    with counted_hits() as hits:
        for seed in range(4):
            hold(seed, engine_with(100 if drafts else 80, groups=groups, drafts=drafts), groups)
    assert hits.shared > 5_000
    if groups:
        assert hits.shared >= 0.9 * hits.cached, hits


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_answers_are_right_however_scarce_blocks_and_states_are(mode: str) -> None:
    preemptions = 0
    for seed in range(6):
        rng = random.Random(seed)
        states, blocks = ROWS + rng.choice((0, 1, 3, 20)), rng.choice((40, 43, 48))
        engine = engine_with(states, blocks, host=100, drafts=rng.choice((0, 2, 5, 16)), preemption_mode=mode)
        hold(seed, engine)
        preemptions += engine.client.counts()["preemptions"]
    assert preemptions > 5


@pytest.mark.parametrize("settings", [{"enable_prefix_caching": False}, {"mamba_cache_mode": "none"}])
def test_forks_share_their_prompt_where_nothing_else_is_shared(settings: dict[str, Any]) -> None:
    engine = engine_with(ROWS + 1, **settings)
    prompt = [random.Random(0).randrange(VOCABULARY) for _ in range(100)]
    outcome = engine.run([add(1, prompt, 9, forks=[2, 3])])
    assert outcome.tokens == dict.fromkeys((1, 2, 3), alone(prompt, 9))
    assert [outcome.ends[number].cached_tokens for number in (1, 2, 3)] == [0, 99, 99]
    engine.assert_all_free()
    outcome = engine.run([add(4, prompt, 9)])
    assert outcome.ends[4].cached_tokens == 0


def test_a_conversation_goes_on_from_the_end_of_its_last_answer() -> None:
    engine = engine_with(40, mamba_block_size=64)
    prompt = [random.Random(0).randrange(VOCABULARY) for _ in range(45)]
    answer = engine.run([add(1, prompt, 30)]).tokens[1]
    outcome = engine.run([add(2, [*prompt, *answer, 1, 2, 3], 5), add(3, prompt, 5)])
    assert outcome.ends[2].cached_tokens == 72, "74 tokens were computed"
    assert outcome.ends[3].cached_tokens == 40


def test_checkpoints_that_nobody_uses_make_room_for_new_ones() -> None:
    engine = engine_with(ROWS + 3)
    prompts = [[seed, *range(40)] for seed in range(8)]
    for number, prompt in enumerate(prompts):
        engine.run([add(number, prompt, 1)])
    assert engine.run([add(100, prompts[-1], 1)]).ends[100].cached_tokens == 40
    assert engine.run([add(101, prompts[0], 1)]).ends[101].cached_tokens == 0


# --- planted bugs -----------------------------------------------------------------------------------------------------


def violation(drafts: int = 0) -> str:
    """What the first conversations say that show the bug; empty if none do."""
    for seed in range(5):
        try:
            hold(seed, engine_with(ROWS + 20, drafts=drafts))
        except Exception as error:
            return str(error) or type(error).__name__
    return ""


def test_nothing_is_found_without_a_bug() -> None:
    assert violation() == ""


def test_a_stale_state_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new sequence goes on with what the last owner left."""
    admit = SequenceStates.admit

    def keep_the_old(states: SequenceStates, request: Request, step: Step) -> None:
        admit(states, request, step)
        step.state_loads = [(source, target) for source, target in step.state_loads if source]

    monkeypatch.setattr(SequenceStates, "admit", keep_the_old)
    assert "sequence" in violation()


def test_the_state_of_another_sequence_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint is evicted, but its key still leads to it."""

    def forget_to_evict(pool: BlockPool, block: int) -> None:
        pool._key_of.pop(block, None)

    evict = BlockPool.evict
    table_init = BlockTable.__init__

    def init(table: BlockTable, pool: BlockPool, groups: Sequence[CacheGroup], states: BlockPool | None = None) -> None:
        table_init(table, pool, groups, states)
        if states is not None:
            monkeypatch.setattr(
                BlockPool, "evict", lambda each, block: (forget_to_evict if each is states else evict)(each, block)
            )

    monkeypatch.setattr(BlockTable, "__init__", init)
    assert "sequence" in violation()


@pytest.mark.parametrize("late", [0, -3])
def test_a_checkpoint_that_rejected_drafts_have_not_reached_is_found(
    monkeypatch: pytest.MonkeyPatch, late: int
) -> None:
    """A request counts as past a mark by what was planned; or a mark is set where a step in flight has passed it."""
    if late:
        mark = SequenceStates._mark
        monkeypatch.setattr(SequenceStates, "_mark", lambda s, r, start, step: mark(s, r, start + late, step))
        monkeypatch.setattr(SequenceStates, "_keep", _every_second(SequenceStates._keep))
    else:
        passed = SequenceStates._take_passed

        def take_all(states: SequenceStates, request: Request) -> bool:
            request.computed, computed = request.planned, request.computed
            left = passed(states, request)
            request.computed = computed
            return left

        monkeypatch.setattr(SequenceStates, "_take_passed", take_all)
    assert "sequence" in violation(drafts=5)


def _every_second(keep: Any) -> Any:
    numbers = count()
    return lambda states: keep(states) if next(numbers) % 2 else 0


@pytest.mark.parametrize("off", [-1, 1])
def test_a_checkpoint_that_is_a_token_off_is_found(monkeypatch: pytest.MonkeyPatch, off: int) -> None:
    chunk_tokens = SequenceStates.chunk_tokens
    checkpoint = SequenceStates._checkpoint

    def shifted_chunk(states: SequenceStates, request: Request, count: int) -> int:
        cut = chunk_tokens(states, request, count)
        return max(1, min(count, cut + off)) if cut < count else cut

    def rounded(states: SequenceStates, request: Request, length: int, step: Step) -> None:
        checkpoint(states, request, (length + 1) // BLOCK * BLOCK, step)

    def moved(states: SequenceStates, requests: Sequence[Request], index: Any, step: Step, counts: Any) -> None:
        for request in requests:
            if (request.planned - off) % BLOCK == 0 and request.planned > 1:
                checkpoint(states, request, request.planned - off, step)

    monkeypatch.setattr(SequenceStates, "chunk_tokens", shifted_chunk)
    monkeypatch.setattr(SequenceStates, "_checkpoint", rounded)
    monkeypatch.setattr(SequenceStates, "moved", moved)
    assert "sequence" in violation()
