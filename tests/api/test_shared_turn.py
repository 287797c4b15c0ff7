"""Long work that lets others run."""

from __future__ import annotations

import asyncio
import time

from quire.api.shared_turn import PIECE_S, SharedTurn


def count_turns_of_others(step_s: float, steps: int) -> int:
    """How often another task runs while one works."""

    async def main() -> int:
        turns, done = 0, False

        async def other() -> None:
            nonlocal turns
            while not done:
                turns += 1
                await asyncio.sleep(0)

        watching = asyncio.create_task(other())
        turn = SharedTurn()
        for _ in range(steps):
            time.sleep(step_s)
            await turn.share()
        done = True
        await watching
        return turns

    return asyncio.run(main())


def test_others_run_between_pieces_of_long_work() -> None:
    assert count_turns_of_others(1.5 * PIECE_S, 8) >= 8


def test_short_work_is_not_interrupted() -> None:
    assert count_turns_of_others(0.0, 3) <= 2  # the other's first turn, and one in which this thread was late
