"""The metrics of an `LLM`. Imports Prometheus' client when it is first used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.engine.metrics.stats import Stats
from quire.foundation.clock import SystemClock
from quire.foundation.messages.from_engine import Done
from quire.foundation.messages.to_engine import Control
from quire.offline.local_engine import LocalEngine
from quire.offline.run_stats import RunStats

if TYPE_CHECKING:
    from quire.engine.metrics.reader import Metric


class OfflineMetrics:
    """Statistics of one engine since its start.

    Args:
        local: The engine.

    Attributes:
        run: Counts the sequences of each call.
    """

    def __init__(self, local: LocalEngine) -> None:
        self._local = local
        self._stats = Stats()
        most = local.config.model.max_model_len
        assert isinstance(most, int)
        self._stats.set_max_model_len(most)
        self.run = RunStats(self._stats, SystemClock())

    def read(self) -> list[Metric]:
        """All of them now."""
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
