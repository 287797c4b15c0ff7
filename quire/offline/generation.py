"""Sequences of one offline call on their way through the engine of this process, from their Adds to their ends.

Owns the loop over messages. Knows nothing about prompts as the user gave them, or about outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from quire.engine.client import EngineClient
from quire.errors import GenerationError
from quire.messages import Abort, Deltas, FromEngine
from quire.text.gathering import GatheredSequence, deliver

if TYPE_CHECKING:
    from quire.offline.progress_bar import GenerationBar


class Generation:
    """Submits sequences and takes what comes back. The engine begins while others are still being submitted.

    As a context: when it is left early, by an error or an interrupt, what still runs is aborted.

    Args:
        engine: Turned by whoever receives from it.
        head_start: Whenever so many tokens of prompts were submitted, enough for a step, the engine is turned. None: it
            begins when all are.
        bar: Shows who is over; None for none.
    """

    def __init__(self, engine: EngineClient, head_start: int | None = None, bar: GenerationBar | None = None) -> None:
        self._engine = engine
        self._head_start = head_start
        self._bar = bar
        self._open: dict[int, GatheredSequence] = {}
        self._unseen = 0  # tokens of prompts that the engine has not been turned for
        self._errors: list[str] = []

    def __enter__(self) -> Generation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._open:  # must not be found by the next call
            self._engine.send(Abort(list(self._open)))

    def submit(self, request: Sequence[GatheredSequence]) -> None:
        """Hand over the sequences of one prompt. When a step's worth of prompts has come together, the engine plans
        what it can; nobody waits for the device."""
        for sequence in request:
            self._open[sequence.add.id] = sequence
            self._engine.send(sequence.add)
        self._unseen += request[0].add.prompt_len
        if self._head_start is not None and self._unseen >= self._head_start:
            self._unseen = 0
            self._take(self._engine.receive(0.0))

    def finish(self) -> None:
        """Wait until each sequence has ended.

        Raises:
            GenerationError: The engine could not go on with one.
        """
        while self._open:
            self._take(self._engine.receive(None))
        if self._errors:
            raise GenerationError(self._errors[0])

    def _take(self, message: FromEngine | None) -> None:
        if not isinstance(message, Deltas):
            return
        for sequence in deliver(message, self._open):
            if sequence.end is None:
                self._engine.send(Abort([sequence.add.id]))
            elif sequence.end.reason == "error":
                self._errors.append(sequence.end.message)
            del self._open[sequence.add.id]
            if self._bar is not None:
                self._bar.advance(len(sequence.whole.tokens))
