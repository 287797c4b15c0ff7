"""The sequences of one offline call on the engine of this process: submits, collects and counts them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from quire.engine.inprocess import InProcessClient
from quire.engine.metrics.stats import SequenceStats, Stats
from quire.errors import QuireError
from quire.foundation.clock import SystemClock
from quire.foundation.messages.from_engine import Deltas, Done, EndReason, FromEngine
from quire.foundation.messages.to_engine import Abort, Add, Control
from quire.offline.local_engine import LocalEngine
from quire.planning.step_limits import StepLimits
from quire.text.deltas import deltas_by_sequence
from quire.text.sequence_accumulator import SequenceAccumulator, dispatch_deltas, failure_of

if TYPE_CHECKING:
    from quire.engine.metrics.reader import Metric
    from quire.offline.progress_bar import ProgressBar


class OfflineMetrics:
    """Statistics of one engine since its start. Counts open sequences while their messages pass."""

    def __init__(self, local: LocalEngine) -> None:
        self._local = local
        self._clock = SystemClock()
        self._stats = Stats()
        self._stats.set_buckets(local.config.observability.custom_histogram_buckets)
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
        self._stats.finish_sequence(self._open.pop(number), reason, self._clock.now())

    def read(self) -> list[Metric]:
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


class OfflineRun:
    """Submits sequences and collects what comes back. The engine starts while later ones are still being submitted.

    A context: leaving it early, by an error or an interrupt, aborts the sequences that still run. Ctrl-C takes effect
    between two turns of the engine's loop, or at once when it is pressed twice; then the engine is lost.

    Args:
        engine: Runs whenever messages are received from it.
        head_start: Run the engine whenever this many prompt tokens (a step's worth) were submitted. None to run it only
            when all prompts are.
        bar: Shows how many sequences have ended; None for no bar.
        metrics: Counts sequences; None to count nothing.
        ended: Called with each sequence that ends well, while others still run.
    """

    def __init__(
        self,
        engine: InProcessClient,
        head_start: int | None = None,
        bar: ProgressBar | None = None,
        metrics: OfflineMetrics | None = None,
        ended: Callable[[SequenceAccumulator], None] | None = None,
    ) -> None:
        self._ended = ended
        self._metrics = metrics
        self._engine = engine
        self._head_start = head_start
        self._bar = bar
        self._open: dict[int, SequenceAccumulator] = {}
        self._unseen = 0  # prompt tokens submitted since the engine last ran
        self._errors: list[QuireError] = []

    def __enter__(self) -> OfflineRun:
        self._engine.interrupts.install()
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.interrupts.uninstall()
        if self._open:  # the next call must not receive their tokens
            self._engine.send(Abort(list(self._open)))
            if self._metrics is not None:
                for number in self._open:
                    self._metrics.finish(number, "abort")

    def submit(self, request: Sequence[SequenceAccumulator]) -> None:
        """Submit a prompt's sequences. After each step's worth of prompts, the engine plans without waiting for the
        device."""
        for sequence in request:
            self._open[sequence.add.id] = sequence
            if self._metrics is not None:
                self._metrics.start(sequence.add)
        self._engine.send(request[0].add)  # with its forks
        self._unseen += request[0].add.prompt_len
        if self._head_start is not None and self._unseen >= self._head_start:
            self._unseen = 0
            self._take(self._engine.receive(0.0))

    def finish(self) -> None:
        """Wait until all sequences have ended. Raises GenerationError if a sequence failed, and RequestError if a
        request asks for something that cannot be done."""
        while self._open:
            self._take(self._engine.receive(None))
        if self._errors:
            raise self._errors[0]

    def _take(self, message: FromEngine | None) -> None:
        if not isinstance(message, Deltas):
            return
        if self._metrics is not None:
            self._metrics.take(message)
        for sequence in dispatch_deltas(message, self._open):
            if sequence.end is None:
                self._engine.send(Abort([sequence.add.id]))
            elif (error := failure_of(sequence.end)) is not None:
                self._errors.append(error)
            elif self._ended is not None:
                self._ended(sequence)
            del self._open[sequence.add.id]
            if self._metrics is not None:
                self._metrics.finish(sequence.add.id, "stop" if sequence.end is None else sequence.end.reason)
            if self._bar is not None:
                self._bar.advance(len(sequence.whole.tokens))
