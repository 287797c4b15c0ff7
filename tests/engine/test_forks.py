"""The n sequences of a prompt come in one Add: the prompt is not copied or hashed again, and each gets one End."""

from __future__ import annotations

import random
from typing import Any

import pytest

import quire.scheduling.kvcache.block_hashes
from quire.foundation.messages.to_engine import Abort, Add, Control, Fork
from tests.engine.harness import Engine, add, alone
from tests.executor.fake import FakeExecutor

PROMPT = [random.Random(1).randrange(512) for _ in range(90)]


def replay(first: list[int], *others: list[int], max_tokens: int = 12) -> Add:
    """A prompt whose sequences have generated these tokens already."""
    message = add(1, PROMPT + first, max_tokens, prompt_len=len(PROMPT))
    forks = [Fork(2 + index, 0, generated) for index, generated in enumerate(others)]
    return Add(**{name: getattr(message, name) for name in message.__struct_fields__} | {"forks": forks})


@pytest.mark.parametrize("settings", [{}, {"max_num_seqs": 2}, {"enable_prefix_caching": False}])
def test_each_fork_gets_what_it_gets_alone(settings: dict[str, Any]) -> None:
    engine = Engine(FakeExecutor(num_blocks=60), **settings)
    outcome = engine.run([add(1, PROMPT, 9, forks=[2, 3, 4], prompt_logprobs=0)])
    assert outcome.tokens == dict.fromkeys([1, 2, 3, 4], alone(PROMPT, 9))
    engine.assert_all_free()


@pytest.mark.parametrize("steps", range(7))
def test_forks_outlive_a_first_sequence_that_is_aborted(steps: int) -> None:
    engine = Engine(FakeExecutor(num_blocks=60), max_num_seqs=3, max_num_batched_tokens=32)
    engine.client.send(add(1, PROMPT, 9, forks=[2, 3, 4]))
    for _ in range(steps):
        engine.step()
    engine.client.send(Abort([1]))
    while len(engine.outcome.ends) < 4:
        engine.step()
    engine.finish_steps()
    assert engine.outcome.ends.pop(1).reason == "abort"
    assert {end.reason for end in engine.outcome.ends.values()} == {"length"}
    assert all(engine.outcome.tokens[number] == alone(PROMPT, 9) for number in (2, 3, 4))
    engine.assert_all_free()


def test_what_is_refused_ends_each_of_its_sequences() -> None:
    engine = Engine()
    outcome = engine.run([add(1, [600], 4, forks=[2, 3])])
    assert [(number, end.reason) for number, end in sorted(outcome.ends.items())] == [
        (1, "error"), (2, "error"), (3, "error"),
    ]  # fmt: skip
    engine.client.send(Control(9, "drain"))
    outcome = engine.run([add(4, [1], 4, forks=[5])])
    assert "shutting down" in outcome.ends[4].message
    assert "shutting down" in outcome.ends[5].message


@pytest.mark.parametrize("preempted", [False, True])
def test_a_replay_goes_on_where_each_sequence_stopped(preempted: bool) -> None:
    full = alone(PROMPT, 12)
    engine = Engine(FakeExecutor(num_blocks=8 if preempted else 60))
    outcome = engine.run([replay(full[:7], full[:2], [], full[:11], full)])
    assert outcome.tokens == {1: full[7:], 2: full[2:], 3: full, 4: full[11:]}
    assert {end.reason for end in outcome.ends.values()} == {"length"}
    engine.assert_all_free()


def test_a_replayed_token_outside_the_vocabulary_fails_its_sequence_alone() -> None:
    full = alone(PROMPT, 12)
    outcome = Engine().run([replay(full[:7], [512], full[:2])])
    assert outcome.tokens == {1: full[7:], 3: full[2:]}
    assert "Token ids" in outcome.ends[2].message


@pytest.mark.parametrize("generated", [12, 13])
def test_a_replay_that_has_all_its_tokens_ends_at_once(generated: int) -> None:
    engine = Engine()
    outcome = engine.run([add(1, PROMPT + [5] * generated, 12, prompt_len=len(PROMPT))], steps=20)
    assert outcome.ends[1].reason == "length"
    assert outcome.tokens == {}
    engine.assert_all_free()


def test_the_prompt_is_hashed_once_even_if_the_first_sequence_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = 0

    def counting(data: bytes) -> Any:
        nonlocal hashed
        hashed += 1
        return sha256(data)

    sha256 = quire.scheduling.kvcache.block_hashes.sha256
    monkeypatch.setattr(quire.scheduling.kvcache.block_hashes, "sha256", counting)
    prompt = PROMPT * 3
    engine = Engine(FakeExecutor(num_blocks=60), max_num_seqs=1)
    outcome = engine.run([add(1, prompt, 1, forks=range(2, 9))])
    assert len(outcome.ends) == 8
    assert hashed < 2 * len(prompt) // 16 + 2 * 8, "a root for each, and each block once"


def test_waiting_forks_share_the_prompts_tokens() -> None:
    engine = Engine(max_num_seqs=1)
    engine.client.send(add(1, PROMPT, 9, forks=range(2, 9)))
    engine.step()
    requests = list(engine.client._core._scheduler.requests())
    assert len(requests) == 8
    assert len({id(request.tokens) for request in requests if request.slot is None}) == 1
    assert len({id(request.tokens) for request in requests}) == 2
