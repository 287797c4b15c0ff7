"""What one pipeline stage hands the next."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from quire.compute.collectives.delta import Delta, total_of


class Stream(NamedTuple):
    """The residual stream between two blocks.

    Attributes:
        x: [tokens, hidden]; blocks change it in place.
        delta: [tokens, hidden], what is still to be added; None: nothing is.
    """

    x: Tensor
    delta: Delta | None

    def tensors(self) -> tuple[Tensor, Tensor | None]:
        """Return x and the finished delta, for a reader other than the next norm."""
        return self.x, None if self.delta is None else total_of(self.delta)


class StreamSource(Protocol):
    """Where a stage's streams come from."""

    def receive(self, tokens: int) -> Stream:
        """Wait for the stream of the next step, which has so many tokens, and return it."""
        ...


class StreamSink(Protocol):
    """Where a stage's streams go to."""

    def send(self, stream: Stream) -> None:
        """Hand over the stream of a step; may wait while the next stage has steps to do."""
        ...


class StageLinks(NamedTuple):
    """A rank's links from the stage before its own and to the one after; None: there is no such stage."""

    before: StreamSource | None = None
    after: StreamSink | None = None


NO_LINKS = StageLinks()
