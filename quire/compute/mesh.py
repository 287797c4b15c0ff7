"""How a model is divided over ranks: which ranks there are, and which part of a layer each has. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

from quire.foundation.config.parallel import ParallelConfig


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
        ep: Ranks that divide the experts of a layer, whole ones each (expert parallel): those of `tp`, or of several
            engines beside one another; or 1, where every expert is divided like any MLP.
        engine: Which of the engines that divide their experts this rank is of.
    """

    rank: int = 0
    tp: int = 1
    pp: int = 1
    ep: int = 1
    engine: int = 0

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.tp * self.pp, f"rank {self.rank} of {self.tp} × {self.pp}"
        assert self.ep == 1 or self.ep % self.tp == 0, f"experts over {self.ep} ranks, {self.tp} an engine"
        assert 0 <= self.engine < self.engines, f"engine {self.engine} of {self.engines}"

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.tp * self.pp

    @property
    def tp_rank(self) -> int:
        """This rank's number among those that divide the same layers."""
        return self.rank % self.tp

    @property
    def engines(self) -> int:
        """How many engines divide their experts among all their ranks."""
        return max(1, self.ep // self.tp)

    @property
    def ep_rank(self) -> int:
        """This rank's number among those that divide experts."""
        return self.engine * self.tp + self.tp_rank

    @property
    def stage(self) -> int:
        """The number of this rank's group of layers."""
        return self.rank // self.tp

    @property
    def is_first(self) -> bool:
        """Whether tokens enter here."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether logits come out here."""
        return self.stage == self.pp - 1

    def own_layers(self, layers: int) -> range:
        """This rank's of a model's layers. Where they cannot be divided evenly, stages in the middle have one more:
        the first one embeds tokens, the last one has the head.

        >>> [len(Mesh(rank, pp=3).own_layers(7)) for rank in range(3)]
        [2, 3, 2]
        """
        each, rest = divmod(layers, self.pp)
        has_one_more = sorted(range(self.pp), key=lambda stage: (stage in (0, self.pp - 1), stage))[:rest]
        begin = self.stage * each + sum(stage < self.stage for stage in has_one_more)
        return range(begin, begin + each + (self.stage in has_one_more))

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

    def own_experts(self, count: int) -> Span:
        """This rank's of a layer's experts. Where they cannot be divided evenly, the first ranks have one more.

        >>> [Mesh(rank, tp=4, ep=4).own_experts(6).count for rank in range(4)]
        [2, 2, 1, 1]
        >>> [Mesh(rank, tp=2, ep=4, engine=1).own_experts(8).start for rank in range(2)]
        [4, 6]
        """
        each, rest = divmod(count, self.ep)
        number = self.ep_rank
        return Span(number * each + min(number, rest), each + (number < rest))


def mesh_of(parallel: ParallelConfig, rank: int = 0, engine: int = 0) -> Mesh:
    """A rank's place among those that the settings ask for; `engine` counts where engines divide experts."""
    tp, is_shared = parallel.tensor_parallel_size, parallel.engines_share_experts
    ep = tp * (parallel.data_parallel_size if is_shared else 1) if parallel.enable_expert_parallel else 1
    return Mesh(rank, tp, parallel.pipeline_parallel_size, ep, engine if is_shared else 0)
