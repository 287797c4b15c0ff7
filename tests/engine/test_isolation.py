"""A prompt that says so runs alone, and changes no output, neither its own nor that of others."""

from __future__ import annotations

import pytest

from quire.foundation.messages.to_engine import Abort, Add, Control
from quire.foundation.messages.workers import Plan
from tests.engine.harness import Engine, HashMasker, add, alone
from tests.executor.fake import FakeExecutor

BODY = 30
"""Tokens of every request here."""


class Watched(Engine):
    """An engine that notes which prompts each step had rows of."""

    def __init__(self, *args: object, **settings: object) -> None:
        super().__init__(*args, **settings)  # type: ignore[arg-type]
        core = self.client._core
        self.steps: list[set[int]] = []
        submit = core._executor.submit

        def note(plan: Plan) -> None:
            self.steps.append({r.add.prompt_id for r in core._scheduler._steps_in_flight[-1].requests})
            submit(plan)

        core._executor.submit = note  # type: ignore[method-assign]

    def run_steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def alone_at(self, prompt: int) -> list[int]:
        """The steps that had rows of this prompt only."""
        return [number for number, prompts in enumerate(self.steps) if prompts == {prompt}]


def healthy(number: int, **more: object) -> Add:
    return add(number, [number] * 3, BODY, **more)  # type: ignore[arg-type]


def outputs(*numbers: int) -> dict[int, list[int]]:
    return {number: alone([number] * 3, BODY) for number in numbers}


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_it_runs_alone_for_so_many_tokens_and_then_beside_all_others(mode: str) -> None:
    engine = Watched(preemption_mode=mode)
    for number in (1, 2):
        engine.client.send(healthy(number))
    engine.run_steps(6)
    engine.client.send(healthy(3, alone=4))
    engine.client.send(healthy(4))
    outcome = engine.run([healthy(5)])
    engine.run_steps(40)
    assert outcome.tokens == outputs(1, 2, 3, 4, 5)
    own = engine.alone_at(3)
    assert own == list(range(own[0], own[0] + len(own))), "in one go"
    assert len(own) >= 4
    assert all(3 not in prompts for prompts in engine.steps[: own[0]])
    assert engine.steps[own[-1] + 1] == {1, 2, 3, 4, 5}
    engine.assert_all_free()


def test_several_run_one_after_the_other() -> None:
    engine = Watched()
    adds = [healthy(1), healthy(2, alone=4), healthy(3), healthy(4, alone=4, forks=[5, 6])]
    outcome = engine.run(adds)
    assert outcome.tokens == outputs(1, 2, 3, 4) | {number: alone([4] * 3, BODY) for number in (5, 6)}
    first, second = engine.alone_at(2), engine.alone_at(4)
    assert first[0] == 0
    assert first[-1] < second[0]
    assert engine.steps[second[-1] + 1] == {1, 2, 3, 4}
    engine.assert_all_free()


def test_one_that_ends_or_is_aborted_lets_the_others_go_on() -> None:
    engine = Watched()
    short = add(2, [2] * 3, 2, alone=4)
    engine.client.send(healthy(3, alone=4))
    engine.client.send(healthy(4, alone=4))
    engine.run_steps(2)
    engine.client.send(Abort([3, 4]))
    outcome = engine.run([short, healthy(1)])
    assert outcome.tokens[1] == alone([1] * 3, BODY)
    assert outcome.tokens[2] == alone([2] * 3, 2)
    engine.assert_all_free()


def test_one_that_awaits_its_grammar_keeps_nobody_waiting() -> None:
    class Slow(HashMasker):
        compiled = False

        def prepare(self, message: Add) -> bool:
            return not self.wants(message)

        def prepared(self):  # type: ignore[no-untyped-def]
            return [(9, None)] if self.compiled else []

    masker = Slow()
    engine = Watched(masker=masker)
    engine.client.send(healthy(9, alone=4, extra_args={"masked": True}))
    assert engine.run([healthy(1)]).tokens[1] == alone([1] * 3, BODY)
    masker.compiled = True
    engine.client.send(healthy(2))
    engine.run_steps(3 * BODY)
    assert engine.outcome.tokens[9] == alone([9] * 3, BODY, masked=True)
    assert engine.outcome.tokens[2] == alone([2] * 3, BODY)
    assert engine.alone_at(9)[:4]
    engine.assert_all_free()


@pytest.mark.parametrize("mode", ["keep", "wait"])
def test_a_pause_lasts_and_ends_beside_it(mode: str) -> None:
    engine = Watched()
    engine.client.send(healthy(1))
    engine.run_steps(4)
    engine.client.send(healthy(2, alone=4))
    engine.run_steps(3)
    engine.client.send(Control(20, f"pause:{mode}"))
    engine.client.send(healthy(3, alone=4))
    engine.run_steps(60)
    assert 3 not in engine.outcome.tokens
    assert set(engine.outcome.ends) == ({1, 2} if mode == "wait" else set())
    engine.client.send(Control(21, "resume"))
    assert engine.run([healthy(4)]).tokens[4] == alone([4] * 3, BODY)
    engine.run_steps(3 * BODY)
    assert engine.outcome.tokens == outputs(1, 2, 3, 4)
    engine.assert_all_free()


def test_it_finds_room_though_others_have_all_slots_and_blocks() -> None:
    engine = Watched(FakeExecutor(12, 8), block_size=8, max_num_seqs=2)
    for number in (1, 2):
        engine.client.send(healthy(number))
    engine.run_steps(6)
    outcome = engine.run([healthy(3, alone=4)])
    engine.run_steps(3 * BODY)
    assert outcome.tokens == outputs(1, 2, 3)
    engine.assert_all_free()
