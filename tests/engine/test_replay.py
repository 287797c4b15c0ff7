"""A sequence that goes on in another engine brings what it would have brought in one."""

from __future__ import annotations

import random
from typing import Any

import pytest
from msgspec.structs import replace

from quire.foundation.messages.from_engine import Deltas
from quire.foundation.messages.to_engine import Add, Fork
from quire.serving.api.session.open_requests import OpenRequests, replay_adds
from quire.serving.api.session.output_collector import OutputCollector
from quire.text.deltas import deltas_by_sequence
from tests.engine.harness import Engine, HashMasker, add, alone
from tests.executor.fake import FakeExecutor

Outputs = dict[int, tuple[list[int], str]]
"""Tokens and end reason, by sequence."""


def run_until(engine: Engine, requests: OpenRequests, tokens: int, outputs: Outputs) -> None:
    """Steps, until so many tokens have come; what comes is recorded as a session does."""
    seen = 0
    while seen < tokens and requests.num_sequences:
        message = engine.client.receive(0.0)
        if isinstance(message, Deltas):
            for number, delta in deltas_by_sequence(message).items():
                if (sequence := requests.get(number)) is not None:
                    sequence.record(delta)
                    seen += len(delta.tokens)
                    if delta.end is not None:
                        outputs[number] = (list(sequence.generated), delta.end.reason)
                        requests.remove(number)


def in_several_engines(adds: list[Add], lives: list[int], **engine: Any) -> Outputs:
    """The outputs and end reasons of all sequences, by engines that die after so many tokens each."""
    requests, outputs = OpenRequests(), Outputs()
    for message in adds:
        requests.add(OutputCollector(message.sequences(), []), [0] * len(message.sequences()))
    for tokens in (*lives, 10**9):
        requests.engine_died(0)
        masker = HashMasker() if engine.get("masked") else None
        current = Engine(FakeExecutor(num_blocks=engine.get("num_blocks", 64)), masker=masker)
        for again in replay_adds(requests.unsent(0)):
            current.client.send(again)
        run_until(current, requests, tokens, outputs)
    return outputs


@pytest.mark.parametrize("seed", range(8))
def test_tokens_are_those_of_one_engine_wherever_it_dies(seed: int) -> None:
    rng = random.Random(seed)
    prompts = {100 * i: [rng.randrange(512) for _ in range(rng.randint(1, 90))] for i in range(1, 9)}
    adds = [add(i, prompt, rng.randint(1, 60), forks=range(i + 1, i + 1 + i % 3)) for i, prompt in prompts.items()]
    lives = [rng.randint(0, 150) for _ in range(4)]
    outputs = in_several_engines(adds, lives, num_blocks=rng.choice([24, 64]))
    wanted = {
        sequence.id: (alone(sequence.tokens, sequence.sampling.max_tokens or 0), "length")
        for message in adds
        for sequence in message.sequences()
    }
    assert outputs == wanted


def test_masks_and_stop_tokens_go_on_where_they_were() -> None:
    prompt = [5, 6, 7]
    masked = alone(prompt, 60, masked=True)
    stop = masked[40]
    end = masked.index(stop) + 1
    request = add(1, prompt, 60, stop_ids=[stop], extra_args={"masked": True})
    outputs = in_several_engines([request], [10, 15], masked=True)
    assert outputs == {1: (masked[:end], "stop")}


def test_a_sequence_that_was_over_ends_again_with_the_same_reason() -> None:
    prompt, tokens = [5, 6, 7], alone([5, 6, 7], 9)
    whole = replace(add(1, [*prompt, *tokens], 9), prompt_len=3)
    stopped = replace(add(2, [*prompt, *tokens], 20, stop_ids=[tokens[-1]]), prompt_len=3)
    too_early = replace(add(3, [*prompt, *tokens], 20, stop_ids=[tokens[-1]], min_tokens=15), prompt_len=3)
    fork = replace(add(4, [*prompt, *tokens], 9), prompt_len=3, forks=[Fork(5, 5, tokens[:2])])
    engine = Engine()
    outcome = engine.run([whole, stopped, too_early, fork])
    assert {number: end.reason for number, end in outcome.ends.items() if number != 3} == {
        1: "length",
        2: "stop",
        4: "length",
        5: "length",
    }
    assert outcome.tokens[5] == tokens[2:], "its parent was over at once"
    assert len(outcome.tokens[3]) >= 6
    engine.assert_all_free()
