"""How a model is divided over ranks: which ranks there are, and which part of a layer each has. Plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """Entries `start` to `start + count - 1` of something."""

    start: int
    count: int


@dataclass(frozen=True)
class Mesh:
    """One rank's place among all. A rank is a worker with a device of its own.

    Attributes:
        rank: From 0 on; ranks that divide the same layers are neighbours.
        tp: Ranks that divide each layer (tensor parallel).
        pp: Groups of layers, one behind the other (pipeline parallel).
        ep: Ranks that divide the experts of a layer (expert parallel).
    """

    rank: int = 0
    tp: int = 1
    pp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.tp * self.pp, f"rank {self.rank} of {self.tp} × {self.pp}"

    @property
    def tp_rank(self) -> int:
        """This rank's number among those that divide the same layers."""
        return self.rank % self.tp

    def part(self, units: int) -> Span:
        """This rank's of `units`, which are divided evenly; of fewer units than ranks, neighbours have the same one.

        >>> Mesh(3, tp=4).part(8), Mesh(3, tp=4).part(2)
        (Span(start=6, count=2), Span(start=1, count=1))
        """
        assert units % self.tp == 0 or self.tp % units == 0, f"{units} over {self.tp} ranks"
        return Span(self.tp_rank * units // self.tp, max(1, units // self.tp))

    def padded_part(self, count: int) -> Span:
        """This rank's of `count` entries, of which the last rank may have fewer than the others.

        >>> Mesh(1, tp=2).padded_part(5)
        Span(start=3, count=2)
        """
        each = -(-count // self.tp)
        start = self.tp_rank * each
        return Span(start, min(each, count - start))
