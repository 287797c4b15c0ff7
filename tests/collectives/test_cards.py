"""How sums of ranks with cards are made, as far as it shows without cards. The rest: `tests/gpu/test_rank_sums.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.compute.collectives import cards
from quire.compute.collectives.cards import Cards, Rehearsed
from quire.compute.collectives.custom_all_reduce import LIMITS, NormWay, RankMemory, Way, limits_of, way_of
from quire.compute.kernels.triton.ranks import window
from quire.compute.mesh import Mesh


class Watched:
    """In place of NCCL and of the ranks' memory: says what is asked of it."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def all_reduce(self, x: Tensor, way: Way = "nccl") -> None:
        self.asked.append(way)

    def gather_columns(self, x: Tensor, out: Tensor) -> None:
        self.asked.append("gather")

    def norm_way_of(self, x: Tensor, weight: Tensor) -> NormWay:
        return "pull"

    def norm(self, *given: object) -> None:
        self.asked.append(f"norm by {given[-1]}")


def cards_of(memory: Watched | None, nccl: Watched, ranks: int = 2) -> Cards:
    found = object.__new__(Cards)
    found._ranks, found._memory, found._nccl = ranks, memory, nccl  # type: ignore[assignment]
    return found


def test_the_way_follows_from_the_size_alone() -> None:
    assert [way_of(size, 2) for size in (4, 1 << 20, (1 << 20) + 4, 1 << 25, (1 << 25) + 4)] == [
        "push", "push", "pull", "pull", "nccl"
    ]  # fmt: skip
    assert way_of(6, 2) == "nccl", "no whole words"
    assert way_of(1 << 20, 8) == "nccl"


def test_other_numbers_of_ranks_have_the_limits_of_the_next_larger() -> None:
    assert limits_of(3) == LIMITS[4]
    assert limits_of(6) == limits_of(16) == LIMITS[8]


def test_no_limit_is_beyond_what_a_window_holds() -> None:
    for ranks, limits in LIMITS.items():
        assert limits.pushed <= 4 * window.PUSHED_WORDS
        assert limits.pushed <= limits.pulled <= window.PULLED_BYTES
        layout = window.layout_of(ranks)
        assert layout.row_flags >= 4 * window.MAX_RANKS * window.PULLED_PROGRAMS
        assert layout.arrivals - layout.row_flags >= 4 * window.MAX_RANKS * window.PULLED_PROGRAMS
        assert layout.buffers - layout.arrivals == 2 * ranks * 8 * window.PUSHED_WORDS
        assert layout.rings - layout.buffers == 2 * window.PULLED_BYTES
        assert layout.size - layout.rings == window.PULLED_PROGRAMS * window.STEPS * window.STEP_BYTES
        assert not any(at % 16 for at in layout)


def test_without_memory_of_others_nccl_does_all() -> None:
    nccl, memory = Watched(), Watched()
    x, out = torch.zeros(2, 8), torch.zeros(2, 16)
    for made in (cards_of(None, nccl), cards_of(memory, nccl)):
        made.all_reduce(x)
        made.gather_columns(x, out)
    assert (nccl.asked, memory.asked) == (["nccl", "gather"], ["push", "gather"])
    cards_of(memory, nccl).all_reduce(torch.empty(1 << 24, device="meta"))
    assert nccl.asked[-1] == "nccl"


def test_a_rehearsal_asks_nothing_of_nccl() -> None:
    memory = Watched()
    rehearsed = Rehearsed(memory, 2)  # type: ignore[arg-type]
    for size in (8, 1 << 19, 1 << 24):
        rehearsed.all_reduce(torch.empty(size, device="meta"))
    assert rehearsed.norms is not None
    x = torch.empty(2, 8)
    rehearsed.norms.rms_norm(x, x[0], 1e-5, x.clone(), x.clone())
    rehearsed.norms.rms_norm_quantized(x, x[0], 1e-5, torch.int8, x.clone())
    assert memory.asked == ["push", "pull", "norm by pull", "norm by pull"]
    without = Rehearsed(None, 2)
    without.all_reduce(torch.zeros(8))
    assert without.norms is None


def test_the_way_of_a_norm_follows_from_rows_and_weight() -> None:
    def way(rows: int, width: int, ranks: int = 2, weight: torch.dtype = torch.bfloat16) -> str:
        memory = RankMemory([0] * ranks, Mesh(tp=ranks), torch.device("cpu"))
        x = torch.empty(rows, width, dtype=torch.bfloat16, device="meta")
        return memory.norm_way_of(x, torch.empty(width, dtype=weight))

    assert [way(rows, 4_096) for rows in (1, 128, 129, 32_768)] == ["push", "push", "pull", "pull"]
    assert [way(rows, 4_096, ranks=8) for rows in (8, 9, 32, 33)] == ["push", "pull", "pull", "separate"]
    assert way(1_500, 64) == "pull", "each row takes a whole tile of arrivals"
    assert way(1, 4_096, weight=torch.float32) == way(1, 16_384) == "separate"


def test_too_many_ranks_have_no_windows() -> None:
    assert cards._own_window(Mesh(tp=9)) == (None, "more than 8 ranks")
