"""What the engine's steps did, as heartbeats and `Load` report it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from quire.messages import STEP_TOKEN_BOUNDS, Result


class StepStats:
    """Statistics since the engine's start.

    Args:
        now: Monotonic seconds.

    Attributes:
        token_counts: Steps by the tokens they compute: a bucket for each of STEP_TOKEN_BOUNDS, and one more above.
        token_sum: Tokens of all planned steps.
        last_step, last_step_ms: The last finished step, and its time on the device.
        last_progress: When that step finished, or when the engine was last idle; monotonic seconds.
    """

    def __init__(self, now: float = 0.0) -> None:
        self.token_counts = [0] * (len(STEP_TOKEN_BOUNDS) + 1)
        self.token_sum = 0
        self.last_step, self.last_step_ms = 0, 0.0
        self.last_progress = now

    def planned(self, counts: Sequence[int]) -> None:
        """A step was submitted whose rows compute so many tokens each."""
        tokens = sum(counts)
        self.token_counts[bisect_left(STEP_TOKEN_BOUNDS, tokens)] += 1
        self.token_sum += tokens

    def finished(self, result: Result, now: float) -> None:
        """A step's result is there."""
        self.last_step, self.last_step_ms = result.step, result.device_ms
        self.last_progress = now
