"""The requests whose sequences the engine still runs, by sequence: what was asked and what it has brought so far.

That is all it takes to run them again on another engine. A sequence costs its prompt and 4 bytes for each token of its
output, until it ends.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterator
from contextlib import contextmanager

from quire.api.output_collector import OutputCollector
from quire.messages import Add
from quire.text.deltas import SequenceDelta


class OpenSequence:
    """A sequence that has not ended.

    Attributes:
        add: What was asked.
        collector: Where its output goes.
        generated: Tokens that the engine has sent.
        num_prompt_logprobs: How many of the prompt's log probabilities it has sent.
    """

    __slots__ = ("add", "collector", "generated", "num_prompt_logprobs")

    def __init__(self, add: Add, collector: OutputCollector) -> None:
        self.add = add
        self.collector = collector
        self.generated = array("i")
        self.num_prompt_logprobs = 0

    def record(self, delta: SequenceDelta) -> None:
        """The engine has sent something."""
        self.generated.extend(delta.tokens)
        self.num_prompt_logprobs += len(delta.prompt_logprobs)


class OpenRequests:
    """All sequences that have not ended; and when all have."""

    def __init__(self) -> None:
        self._sequences: dict[int, OpenSequence] = {}
        self._num_kept_open = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_sequences(self) -> int:
        """Sequences that have not ended."""
        return len(self._sequences)

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._sequences

    def get(self, sequence: int) -> OpenSequence | None:
        """A sequence by its id; None when nobody wants it any more."""
        return self._sequences.get(sequence)

    def collectors(self) -> list[OutputCollector]:
        """Of each request once."""
        return list({id(sequence.collector): sequence.collector for sequence in self._sequences.values()}.values())

    def add(self, collector: OutputCollector) -> None:
        """All sequences of a request begin."""
        self._idle.clear()
        self._sequences.update((add.id, OpenSequence(add, collector)) for add in collector.adds)

    def remove(self, sequence: int) -> None:
        """A sequence has ended, or is not wanted any more."""
        del self._sequences[sequence]
        self._update_idle()

    @contextmanager
    def keep_open(self) -> Iterator[None]:
        """Not idle before this context is left, even while no sequence runs."""
        self._num_kept_open += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_kept_open -= 1
            self._update_idle()

    async def wait_idle(self) -> None:
        """Until no request is open."""
        await self._idle.wait()

    def _update_idle(self) -> None:
        if not self._sequences and not self._num_kept_open:
            self._idle.set()
