"""The engine's loop on the fake executor: each request gets what it would get alone, and nothing is left held."""

from __future__ import annotations

import random
from typing import Any

import pytest

from quire.foundation.messages.from_engine import Done
from quire.foundation.messages.to_engine import Abort, Control
from quire.scheduling.kvcache.cache_groups import FULL, CacheGroup, Chunk, Reach, Window
from tests.engine.harness import Engine, add, alone
from tests.executor.fake import FakeExecutor


@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
@pytest.mark.parametrize("block_size", [8, 16, 32, 128])
@pytest.mark.parametrize("reaches", [(FULL,), (FULL, FULL), (FULL, Window(20), Chunk(9)), (Window(40), FULL)])
def test_each_request_gets_what_it_gets_alone(max_in_flight: int, block_size: int, reaches: tuple[Reach, ...]) -> None:
    rng = random.Random(1)
    groups = [CacheGroup(reach=reach) for reach in reaches]
    executor = FakeExecutor(
        num_blocks=200 * 16 // block_size,
        block_size=block_size,
        groups=groups,
        max_in_flight=max_in_flight,
    )
    engine = Engine(executor, groups, block_size=block_size)
    prompts = {i: [rng.randrange(512) for _ in range(rng.randint(1, 150))] for i in range(30)}
    outcome = engine.run([add(i, p, 1 + i % 9) for i, p in prompts.items()])
    assert outcome.tokens == {i: alone(p, 1 + i % 9) for i, p in prompts.items()}
    assert {e.reason for e in outcome.ends.values()} == {"length"}
    engine.assert_all_free()


@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
def test_preemption_changes_no_token(max_in_flight: int) -> None:
    rng = random.Random(2)
    engine = Engine(FakeExecutor(num_blocks=12, block_size=8, max_in_flight=max_in_flight), block_size=8)
    prompts = {i: [rng.randrange(512) for _ in range(rng.randint(1, 30))] for i in range(12)}
    outcome = engine.run([add(i, p, 40) for i, p in prompts.items()])
    assert outcome.tokens == {i: alone(p, 40) for i, p in prompts.items()}
    assert engine.client.counts()["preemptions"] > 0
    assert any(end.preemptions for end in outcome.ends.values())
    engine.assert_all_free()


def test_stop_token_ends_after_min_tokens_and_wastes_no_token() -> None:
    engine = Engine()
    prompt = [5, 6, 7]
    free = alone(prompt, 50)
    outcome = engine.run(
        [add(1, prompt, 50, stop_ids=[free[4]]), add(2, prompt, 50, stop_ids=[free[4]], min_tokens=20)]
    )
    assert outcome.tokens[1] == free[: free.index(free[4]) + 1]
    assert outcome.ends[1].reason == "stop"
    assert outcome.tokens[2] == free
    assert outcome.ends[2].reason == "length"
    engine.assert_all_free()


def test_replay_goes_on_where_the_output_stopped() -> None:
    prompt = [9, 8, 7]
    full = alone(prompt, 20)
    outcome = Engine().run([add(1, prompt + full[:12], 20, prompt_len=3)])
    assert outcome.tokens[1] == full[12:]


NO_TOKENS: Any = [512, 2**63, -(2**63) - 1, 1.5, -0.5, float("nan"), "3", None]


def test_wrong_adds_end_with_a_reason_and_disturb_nobody() -> None:
    engine = Engine()
    prompt = [1, 2, 3]
    outcome = engine.run([
        add(1, prompt, 10),
        add(2, [600], 4),
        add(3, [-1], 4),
        add(4, [1] * 511, 4),
        add(5, [], 4),
        *(add(6 + i, [1, wrong], 4) for i, wrong in enumerate(NO_TOKENS)),
    ])  # fmt: skip
    assert outcome.tokens == {1: alone(prompt, 10)}
    assert "Token ids" in outcome.ends[2].message
    assert "Token ids" in outcome.ends[3].message
    assert all("Token ids" in outcome.ends[6 + i].message for i in range(len(NO_TOKENS)))
    assert "exceed the 512" in outcome.ends[4].message
    assert "empty" in outcome.ends[5].message
    engine.assert_all_free()


@pytest.mark.parametrize("steps", range(8))
def test_abort_frees_everything_in_every_phase(steps: int) -> None:
    engine = Engine(FakeExecutor(num_blocks=40), max_num_seqs=2, max_num_batched_tokens=16)
    prompts = {i: [i] * 40 for i in range(4)}
    for i, prompt in prompts.items():
        engine.client.send(add(i, prompt, 30))
    for _ in range(steps):
        engine.step()
    engine.client.send(Abort([0, 1, 2, 99]))
    outcome = engine.run([add(7, [4, 5], 3)])
    assert all(outcome.ends[i].reason == "abort" for i in (0, 1, 2))
    engine.run([])
    while 3 not in outcome.ends:
        engine.step()
    engine.finish_steps()
    assert outcome.tokens[3] == alone(prompts[3], 30)
    engine.assert_all_free()


def test_very_many_aborts_are_spread_over_turns_and_each_request_ends_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.engine.core.ABORTED_TOKENS", 3 * 2**11)
    engine = Engine(FakeExecutor(num_blocks=200), max_num_seqs=8)
    for i in range(12):
        engine.client.send(add(i, [i] * 20, 400))
    for _ in range(5):
        engine.step()
    engine.client.send(Abort(list(range(11))))
    turns = []
    while len(engine.outcome.ends) < 11:
        before = len(engine.outcome.ends)
        engine.step()
        turns.append(len(engine.outcome.ends) - before)
    assert max(turns) == 3
    assert {end.reason for end in engine.outcome.ends.values()} == {"abort"}
    engine.run([])
    engine.client.send(Abort([11]))
    engine.finish_steps()
    engine.assert_all_free()


def test_aborted_request_is_in_no_later_plan() -> None:
    planned: list[int] = []
    executor = FakeExecutor(fault=lambda point, step: planned.append(step) if point == "submit" else None)
    engine = Engine(executor)
    engine.client.send(add(1, [1, 2], 100))
    for _ in range(5):
        engine.step()
    engine.client.send(Abort([1]))
    before = len(planned)
    engine.finish_steps()
    assert len(planned) == before
    engine.assert_all_free()


def test_drain_answers_when_the_last_request_has_ended_and_refuses_new_ones() -> None:
    engine = Engine()
    engine.client.send(add(1, [1, 2], 10))
    engine.step()
    engine.client.send(Control(5, "drain"))
    engine.client.send(add(2, [1, 2], 10))
    done = None
    while done is None:
        message = engine.client.receive(0)
        done = message if isinstance(message, Done) else None
    assert done.id == 5
    assert engine.client.counts()["requests"] == 0


def test_a_failing_step_reaches_the_caller() -> None:
    def fail(point: str, step: int) -> None:
        if (point, step) == ("execute", 3):
            raise RuntimeError("planted")

    engine = Engine(FakeExecutor(fault=fail))
    with pytest.raises(RuntimeError, match="planted"):
        engine.run([add(1, [1], 10)])


def test_admission_is_first_come_first_served() -> None:
    engine = Engine(max_num_seqs=1)
    outcome = engine.run([add(i, [i + 1] * 5, 3) for i in range(5)])
    assert list(outcome.ends) == [0, 1, 2, 3, 4]


def test_a_cache_too_small_for_the_longest_sequence_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    Engine(FakeExecutor(num_blocks=40, block_size=16))
    assert not caplog.records
    engine = Engine(FakeExecutor(num_blocks=10, block_size=16))
    assert "holds 160 tokens of one sequence, and not 512" in caplog.text
    outcome = engine.run([add(1, [5] * 100, 50), add(2, [5] * 100, 70)])
    assert [outcome.ends[number].reason for number in (1, 2)] == ["length", "error"]
