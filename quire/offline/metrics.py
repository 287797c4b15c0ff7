"""The metrics of an `LLM`: what its sequences count, and how it is read. Imports Prometheus' client on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.engine.metrics.stats import SequenceStats, Stats
from quire.foundation.clock import SystemClock
from quire.foundation.messages.from_engine import Deltas, Done, EndReason
from quire.foundation.messages.to_engine import Add, Control
from quire.offline.local_engine import LocalEngine
from quire.planning.step_limits import StepLimits
from quire.text.deltas import deltas_by_sequence

if TYPE_CHECKING:
    from quire.engine.metrics.reader import Metric


class OfflineMetrics:
    """Statistics of one engine since its start. Counts open sequences while their messages pass."""

    def __init__(self, local: LocalEngine) -> None:
        self._local = local
        self._clock = SystemClock()
        self._stats = Stats()
        self._stats.set_max_model_len(StepLimits.of(local.config).length)
        self._open: dict[int, SequenceStats] = {}

    def start(self, add: Add) -> None:
        """Count a sequence that goes to the engine."""
        self._open[add.id] = self._stats.start_sequence(add)

    def take(self, deltas: Deltas) -> None:
        """Count what a step brought."""
        now = self._clock.now()
        for number, delta in deltas_by_sequence(deltas).items():
            sequence = self._open.get(number)
            if sequence is not None:
                self._stats.record_tokens(sequence, len(delta.tokens), now, delta.cached_tokens)
                self._stats.record_delivered(sequence, len(delta.tokens))
                sequence.end = delta.end

    def finish(self, number: int, reason: EndReason) -> None:
        """Count a sequence that has ended."""
        self._stats.finish_sequence(self._open.pop(number), reason, self._clock.now())

    def read(self) -> list[Metric]:
        """All metrics as they are now."""
        from quire.engine.metrics.prometheus import Exposition
        from quire.engine.metrics.reader import read_metrics
        from quire.engine.metrics.server_stats import ServerStats

        client = self._local.client
        client.send(Control(0, "counts"))
        while not isinstance(client.receive(None), Done):
            pass  # what an earlier call has aborted
        self._stats.record_heartbeat(client.heartbeat())
        names = self._local.config.model.served_model_name
        model = names[0] if names else self._local.config.model.model
        return read_metrics(Exposition(ServerStats([self._stats]), model, self._local.config.cache).families())
