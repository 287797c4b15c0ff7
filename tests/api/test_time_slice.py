"""Long work that lets others run."""

from __future__ import annotations

import asyncio

import pytest

from quire.serving.api import request_work
from quire.serving.api.request_work import PIECE_S, TimeSlice
from tests.engine.test_client_liveness import ManualClock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    """By which work takes its time."""
    clock = ManualClock()
    monkeypatch.setattr(request_work, "perf_counter", clock.now)
    return clock


def count_turns_of_others(clock: ManualClock, step_s: float, steps: int) -> int:
    """How often another task runs while one works."""

    async def main() -> int:
        turns, done = 0, False

        async def other() -> None:
            nonlocal turns
            while not done:
                turns += 1
                await asyncio.sleep(0)

        watching = asyncio.create_task(other())
        time_slice = TimeSlice()
        for _ in range(steps):
            clock.time += step_s
            await time_slice.offer()
        done = True
        await watching
        return turns

    return asyncio.run(main())


def test_others_run_between_pieces_of_long_work(clock: ManualClock) -> None:
    assert count_turns_of_others(clock, 1.5 * PIECE_S, 8) >= 8


def test_short_work_is_not_interrupted(clock: ManualClock) -> None:
    assert count_turns_of_others(clock, 0.0, 3) == 0
