"""The sequences of one offline call on the engine of this process: submits them and collects their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from quire.engine.inprocess import InProcessClient
from quire.errors import QuireError
from quire.foundation.messages.from_engine import Deltas, FromEngine
from quire.foundation.messages.to_engine import Abort
from quire.text.sequence_accumulator import SequenceAccumulator, dispatch_deltas, failure_of

if TYPE_CHECKING:
    from quire.offline.metrics import OfflineMetrics
    from quire.offline.progress_bar import ProgressBar


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
    """

    def __init__(
        self,
        engine: InProcessClient,
        head_start: int | None = None,
        bar: ProgressBar | None = None,
        metrics: OfflineMetrics | None = None,
    ) -> None:
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
        """Submit the sequences of one prompt. After each step's worth of prompts, the engine plans what it can, without
        waiting for the device."""
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
        """Wait until all sequences have ended.

        Raises:
            GenerationError: A sequence failed.
            RequestError: A request asks for something that cannot be done.
        """
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
            del self._open[sequence.add.id]
            if self._metrics is not None:
                self._metrics.finish(sequence.add.id, "stop" if sequence.end is None else sequence.end.reason)
            if self._bar is not None:
                self._bar.advance(len(sequence.whole.tokens))
