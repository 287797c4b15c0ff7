"""How long the outputs of waiting sequences are expected to be: as long as the latest ones were on average."""

from __future__ import annotations

from quire.foundation.messages.from_engine import EXPECTED_OUTPUT

_MIN_LEARNING_RATE = 1 / 64


class ExpectedOutput:
    """A running mean over sequences that ended by themselves; the first guess counts as one of them.

    Attributes:
        tokens: The mean.
    """

    def __init__(self) -> None:
        self.tokens = float(EXPECTED_OUTPUT)
        self._seen = 1

    def learn(self, tokens: int) -> None:
        """A sequence has ended with so many output tokens."""
        self._seen += 1
        self.tokens += max(_MIN_LEARNING_RATE, 1 / self._seen) * (tokens - self.tokens)
