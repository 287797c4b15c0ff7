"""Ctrl-C while the engine works: the next call gets what a fresh engine would give, or is told why not."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from quire.engine.inprocess import InProcessClient
from quire.errors import EngineDeadError
from quire.foundation.messages.from_engine import Ready
from quire.offline.run import OfflineRun
from quire.runtime.executor.executor import FaultHook, no_faults
from quire.text.sequence_accumulator import SequenceAccumulator
from quire.text.text_stream import ChoiceState
from tests.engine.harness import add, alone, config
from tests.executor.fake import FakeExecutor

PROMPTS = [[number] * (9 + 7 * number) for number in range(4)]
TOKENS = 6
EXPECTED = [alone(prompt, TOKENS) for prompt in PROMPTS]
ROOMS = tuple(f"/quire/{room}/" for room in ("engine", "executor", "offline", "scheduler", "kvcache", "text"))


class Looks:
    """A clock by which some time passes whenever somebody looks, however long that takes: else which lines run would
    depend on it, as some run once a second."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def now(self) -> float:
        self._seconds += 0.02
        return self._seconds


class Calls:
    """Offline calls on one engine."""

    def __init__(self, fault: FaultHook = no_faults) -> None:
        executor = FakeExecutor(num_blocks=12, block_size=8, fault=fault)
        self.engine = InProcessClient(config(max_num_batched_tokens=32, block_size=8), executor, Looks())
        assert isinstance(self.engine.receive(0), Ready)
        self._next = 0

    def generate(self) -> list[list[int]]:
        sequences = []
        with OfflineRun(self.engine, head_start=32) as run:
            for prompt in PROMPTS:
                message, self._next = add(self._next, prompt, TOKENS), self._next + 1
                sequences.append(SequenceAccumulator(message, 0, ChoiceState(message, None)))
                run.submit(sequences[-1:])
            run.finish()
        return [sequence.whole.tokens for sequence in sequences]

    def assert_all_free(self) -> None:
        for _ in range(100):
            self.engine.receive(0)
        counts = self.engine.counts()
        assert counts["requests"] == counts["in_flight"] == 0, counts
        assert counts["free_blocks"] == counts["blocks"], counts
        assert counts["free_slots"] == counts["slots"], counts


def at_lines(call: Callable[[], Any], lines: set[int]) -> int:
    """Run with a SIGINT just before each of these lines of the engine, counted as they run; returns the lines run."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        if not any(room in frame.f_code.co_filename for room in ROOMS):
            return None
        if event == "line":
            count += 1
            if count in lines:
                signal.raise_signal(signal.SIGINT)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("stride", [181, pytest.param(97, marks=pytest.mark.long("engine"))])
def test_wherever_an_interrupt_comes_the_engine_stays_usable(stride: int) -> None:
    lines = at_lines(Calls().generate, set())
    assert lines > 1_000
    for line in range(1, lines, stride):
        calls = Calls()
        with pytest.raises(KeyboardInterrupt):
            at_lines(calls.generate, {line})
        assert calls.generate() == EXPECTED, line
        calls.assert_all_free()


def test_an_interrupted_interrupt_leaves_it_usable_or_says_that_it_is_not() -> None:
    lines, dead = at_lines(Calls().generate, set()), 0
    for line in range(1, lines, 151):
        calls = Calls()
        with pytest.raises(KeyboardInterrupt):
            at_lines(calls.generate, {line, line + 1})
        try:
            assert calls.generate() == EXPECTED, line
        except EngineDeadError:
            dead += 1
    assert 0 < dead < lines // 151


@pytest.mark.parametrize("point", ["submit", "execute", "collect"])
@pytest.mark.parametrize("step", [1, 2, 5])
def test_a_fault_in_a_step_is_raised_and_then_said_plainly(point: str, step: int) -> None:
    def fail(at: str, number: int) -> None:
        if (at, number) == (point, step):
            raise KeyboardInterrupt

    calls = Calls(fail)
    with pytest.raises(KeyboardInterrupt):
        calls.generate()
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="KeyboardInterrupt"):
            calls.generate()


def test_the_handler_of_the_process_is_back_after_a_call() -> None:
    before = signal.getsignal(signal.SIGINT)
    Calls().generate()
    assert signal.getsignal(signal.SIGINT) is before


def test_signals_from_outside_leave_it_usable() -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "tests.offline.interrupted"], cwd=root, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
