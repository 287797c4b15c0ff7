"""What the sequences of `LLM` count in its statistics. Knows nothing about names of metrics."""

from __future__ import annotations

from quire.engine.metrics.stats import SequenceStats, Stats
from quire.foundation.clock import Clock
from quire.foundation.messages.from_engine import Deltas, EndReason
from quire.foundation.messages.to_engine import Add
from quire.text.deltas import deltas_by_sequence


class RunStats:
    """Counts the sequences that are open, while messages of the engine pass.

    Args:
        stats: What they count in.
        clock: For all times.
    """

    def __init__(self, stats: Stats, clock: Clock) -> None:
        self._stats = stats
        self._clock = clock
        self._open: dict[int, SequenceStats] = {}

    def start(self, add: Add) -> None:
        """A sequence goes to the engine."""
        self._open[add.id] = self._stats.start_sequence(add)

    def take(self, deltas: Deltas) -> None:
        """A step brought something."""
        now = self._clock.now()
        for number, delta in deltas_by_sequence(deltas).items():
            sequence = self._open.get(number)
            if sequence is not None:
                self._stats.record_tokens(sequence, len(delta.tokens), now, delta.cached_tokens)
                self._stats.record_delivered(sequence, len(delta.tokens))
                sequence.end = delta.end

    def finish(self, number: int, reason: EndReason) -> None:
        """A sequence has ended."""
        self._stats.finish_sequence(self._open.pop(number), reason, self._clock.now())
