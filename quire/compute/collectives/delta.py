"""The residual stream between two blocks, and what a layer adds to it.

A sum over ranks is made when it is read, so that the norm behind it may add up in its own kernel.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, TypeAlias

from torch import Tensor

from quire.compute.collectives.collectives import Collectives, Norms
from quire.compute.kernels.dispatch import kernel


class PendingDelta(Protocol):
    """A delta that is not finished yet, and is read once."""

    def total(self) -> Tensor:
        """Finish the delta and return it."""
        ...

    def for_norms(self, norms: Norms) -> tuple[Norms, Tensor]:
        """Return norms that finish the delta themselves and its unfinished tensor, or `norms` and the finished
        delta."""
        ...


Delta: TypeAlias = Tensor | PendingDelta
"""What a layer adds to the residual stream, [tokens, width]."""


def total_of(delta: Delta) -> Tensor:
    return delta if isinstance(delta, Tensor) else delta.total()


class PartialSum:
    """A sum over ranks, which `collectives` have not made yet, of each rank's contiguous summand `own`. All ranks read
    it at the same point of their step, in the same way."""

    def __init__(self, own: Tensor, collectives: Collectives) -> None:
        self._own = own
        self._collectives = collectives
        self._is_made = False

    def plus(self, other: PartialSum) -> PartialSum:
        """Return the sum over ranks of both, in place of this one's summand; neither has been read."""
        return PartialSum(added(self._own, other._own), self._collectives)

    def total(self) -> Tensor:
        """Make the sum, once, in place of the summand, and return it."""
        if not self._is_made:
            self._collectives.all_reduce(self._own)
            self._is_made = True
        return self._own

    def for_norms(self, norms: Norms) -> tuple[Norms, Tensor]:
        summing = self._collectives.norms
        if summing is None or self._is_made:
            return norms, self.total()
        return summing, self._own


def sum_of(first: Delta, second: Delta) -> Delta:
    """Return the sum of two deltas, in place of the first; sums over ranks stay one that is not made yet."""
    if isinstance(first, PartialSum) and isinstance(second, PartialSum):
        return first.plus(second)
    return added(total_of(first), total_of(second))


def added(x: Tensor, delta: Tensor) -> Tensor:
    """Add `delta` to x in place and return x, both [tokens, width]."""
    kernel("copy_stream", x.device.type)(x, delta, x)
    return x


class Stream(NamedTuple):
    """The residual stream between two blocks: x [tokens, hidden], which blocks change in place, and `delta` [tokens,
    hidden], what is still to be added; None if nothing is."""

    x: Tensor
    delta: Delta | None

    def tensors(self) -> tuple[Tensor, Tensor | None]:
        """Return x and the finished delta, for a reader other than the next norm."""
        return self.x, None if self.delta is None else total_of(self.delta)


class StreamSource(Protocol):
    def receive(self, tokens: int) -> Stream:
        """Wait for the stream of the next step, which has this many tokens, and return it."""
        ...


class StreamSink(Protocol):
    def send(self, stream: Stream) -> None:
        """Send the stream of a step; may wait while the next stage has steps to do."""
        ...


class StageLinks(NamedTuple):
    """A rank's links from the stage before its own and to the stage after; None: there is no such stage."""

    before: StreamSource | None = None
    after: StreamSink | None = None


NO_LINKS = StageLinks()
