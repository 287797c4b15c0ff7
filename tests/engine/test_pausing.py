"""A paused engine: what goes on, what waits, and that nothing is lost."""

from __future__ import annotations

import pytest

from quire.errors import QuireError
from quire.foundation.messages.from_engine import Done
from quire.foundation.messages.to_engine import Abort, Control
from tests.engine.harness import Engine, HashMasker, add, alone
from tests.executor.fake import FakeExecutor


class PausedEngine(Engine):
    """Remembers the answers to commands."""

    def __init__(self, **settings: object) -> None:
        super().__init__(**settings)  # type: ignore[arg-type]
        self.done: dict[int, Done] = {}
        receive = self.client.receive

        def remember(timeout: float | None):  # type: ignore[no-untyped-def]
            message = receive(timeout)
            if isinstance(message, Done):
                self.done[message.id] = message
            return message

        self.client.receive = remember  # type: ignore[method-assign]

    def command(self, number: int, action: str, steps: int = 8) -> Done | None:
        """The answer, if it comes within some steps."""
        self.client.send(Control(number, action))
        for _ in range(steps):
            self.step()
        return self.done.get(number)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()


def test_keep_freezes_requests_which_go_on_as_if_nothing_had_been() -> None:
    engine = PausedEngine()
    engine.client.send(add(1, [1, 2], 30))
    engine.steps(5)
    assert engine.command(9, "pause:keep") == Done(9)
    had = len(engine.outcome.tokens[1])
    engine.client.send(add(2, [3, 4], 5))
    engine.steps(20)
    assert (len(engine.outcome.tokens[1]), 2 in engine.outcome.tokens) == (had, False)
    answer = engine.command(10, "is_paused")
    assert answer is not None
    assert answer.value == {"paused": True}
    engine.client.send(Control(11, "resume"))
    outcome = engine.run([add(3, [5], 5)])
    engine.steps(30)
    assert outcome.tokens == {1: alone([1, 2], 30), 2: alone([3, 4], 5), 3: alone([5], 5)}
    engine.assert_all_free()


def test_wait_lets_admitted_requests_end_and_holds_all_others() -> None:
    engine = PausedEngine(max_num_seqs=2)
    for number in range(1, 5):
        engine.client.send(add(number, [number] * 3, 20))
    engine.steps(5)
    assert engine.command(9, "pause:wait", steps=3) is None
    engine.client.send(add(5, [7], 3, forks=[6, 7]))
    engine.steps(40)
    assert sorted(engine.outcome.ends) == [1, 2]
    assert engine.done[9] == Done(9)
    assert engine.client.counts()["waiting"] == 5
    assert engine.command(10, "resume") == Done(10)
    engine.steps(80)
    assert sorted(engine.outcome.ends) == [1, 2, 3, 4, 5, 6, 7]
    assert engine.outcome.tokens[3] == alone([3] * 3, 20)
    engine.assert_all_free()


def test_wait_also_waits_for_the_preempted_and_for_forks_of_the_admitted() -> None:
    engine = PausedEngine(executor=FakeExecutor(9, 8), block_size=8, max_num_seqs=4)
    adds = [add(number, [number] * 8, 24) for number in range(1, 4)]
    for message in adds:
        engine.client.send(message)
    while not engine.client.counts()["preemptions"]:
        engine.step()
    engine.client.send(Control(9, "pause:wait"))
    engine.steps(150)
    assert sorted(engine.outcome.ends) == [1, 2, 3]
    assert 9 in engine.done
    forked = PausedEngine()
    forked.client.send(add(1, [1] * 5, 9, forks=[2, 3]))
    forked.step()
    forked.client.send(Control(9, "pause:wait"))
    forked.steps(40)
    assert sorted(forked.outcome.ends) == [1, 2, 3]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_abort_ends_everything_and_new_requests_wait(policy: str) -> None:
    engine = PausedEngine(max_num_seqs=2, scheduling_policy=policy)
    for number in range(1, 5):
        engine.client.send(add(number, [number] * 3, 50))
    engine.steps(5)
    assert engine.command(9, "pause:abort") == Done(9)
    assert {number: end.reason for number, end in engine.outcome.ends.items()} == dict.fromkeys(range(1, 5), "abort")
    engine.client.send(add(5, [7], 3))
    engine.client.send(add(6, [8], 3))
    engine.client.send(Abort([6]))
    engine.steps(10)
    assert engine.outcome.ends[6].reason == "abort"
    assert 5 not in engine.outcome.ends
    engine.command(10, "resume")
    engine.steps(10)
    assert engine.outcome.tokens[5] == alone([7], 3)
    engine.assert_all_free()


def test_a_resume_answers_a_pause_that_still_waits() -> None:
    engine = PausedEngine()
    engine.client.send(add(1, [1, 2], 100))
    engine.steps(3)
    assert engine.command(8, "pause:wait", steps=2) is None
    assert engine.command(9, "resume", steps=2) == Done(9)
    assert "resumed" in engine.done[8].error
    engine.steps(110)
    assert engine.outcome.tokens[1] == alone([1, 2], 100)


def test_one_pause_may_follow_another() -> None:
    engine = PausedEngine()
    engine.client.send(add(1, [1, 2], 20))
    engine.steps(3)
    engine.command(8, "pause:keep")
    engine.client.send(add(2, [3], 4))
    engine.step()
    assert engine.command(9, "pause:wait", steps=40) == Done(9)
    assert engine.outcome.tokens == {1: alone([1, 2], 20)}
    assert engine.command(10, "pause:abort") == Done(10)
    assert engine.outcome.ends[2].reason == "abort"
    engine.assert_all_free()


def test_a_grammar_that_comes_during_the_pause_does_not_end_it() -> None:
    class Late(HashMasker):
        def prepare(self, message: object) -> bool:
            return False

        def prepared(self) -> list[tuple[int, QuireError | None]]:
            return [(1, None)]

    engine = PausedEngine(masker=Late())
    engine.command(8, "pause:wait")
    engine.client.send(add(1, [1, 2], 5, extra_args={"masked": True}))
    engine.steps(20)
    assert 1 not in engine.outcome.tokens
    engine.command(9, "resume")
    engine.steps(20)
    assert engine.outcome.tokens[1] == alone([1, 2], 5, masked=True)


def test_an_unknown_mode_is_refused() -> None:
    answer = PausedEngine().command(8, "pause:maybe")
    assert answer is not None
    assert "unknown action" in answer.error
