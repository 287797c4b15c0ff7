"""Sums and gathered columns over ranks: right, the same bits in all of them, and never waiting for ever."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import Tensor

from quire.compute.collectives.shared_memory import Ranks
from quire.compute.mesh import Mesh
from tests.collectives.in_threads import by_kernels_and_torch, run_ranks

SIZES = (1, 7, 63, 64, 65, 4_097, (1 << 20) // 2 + 3, 600_001)


def given(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(1_000 * rank + size)).to(dtype)


@by_kernels_and_torch
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tp", [2, 3, 4])
def test_all_ranks_get_the_same_sum(tp: int, dtype: torch.dtype, plain: bool) -> None:
    def body(mesh: Mesh, ranks: Ranks) -> list[Tensor]:
        sums = [given(mesh.rank, size, dtype) for size in SIZES]
        for x in sums:
            ranks.all_reduce(x)
        return sums

    found = run_ranks(tp, body, plain=plain)
    for size, first, *others in zip(SIZES, *found, strict=True):
        exact = sum(given(rank, size, dtype).float() for rank in range(tp))
        assert torch.equal(first, exact.to(dtype)), "added in fp32, in the order of ranks"
        assert all(torch.equal(first, other) for other in others)


@by_kernels_and_torch
def test_buffers_are_not_overwritten_while_somebody_reads_them(plain: bool) -> None:
    rounds = 200 if plain else 3_000

    def body(mesh: Mesh, ranks: Ranks) -> list[int]:
        wrong = []
        for number in range(rounds):
            x = torch.full((40,), float(number + mesh.rank))
            ranks.all_reduce(x)
            if not torch.equal(x, torch.full((40,), 3.0 * number + 3)):
                wrong.append(number)
        return wrong

    assert run_ranks(3, body, plain=plain) == [[], [], []]


@by_kernels_and_torch
@pytest.mark.parametrize("width", [8, 9, 300_000])
def test_columns_stand_side_by_side(width: int, plain: bool) -> None:
    tp, rows = 4, 5
    whole = torch.randn(rows, width)

    def body(mesh: Mesh, ranks: Ranks) -> Tensor:
        part = mesh.padded_part(width)
        more = torch.cat((whole[:, part.start : part.start + part.count], torch.full((rows, 1), torch.nan)), 1)
        out = torch.empty(rows, width)
        ranks.gather_columns(more, out)
        return out

    assert all(torch.equal(out, whole) for out in run_ranks(tp, body, vocab_size=width, plain=plain))


@by_kernels_and_torch
def test_a_rank_that_does_not_come_is_named_and_nobody_waits_again(plain: bool) -> None:
    patience_s, started = 1.0, threading.Barrier(3)

    def body(mesh: Mesh, ranks: Ranks) -> tuple[int | None, float]:
        x = torch.ones(10)
        started.wait()
        ranks.all_reduce(x)
        began = time.monotonic()
        if mesh.rank != 1:
            for _ in range(100):
                ranks.all_reduce(x)
        return ranks.missing, time.monotonic() - began

    (first, its_s), _, (last, others_s) = run_ranks(3, body, plain=plain, patience_s=patience_s)
    assert first == last == 1
    assert 0.9 * patience_s < max(its_s, others_s) < 50 * patience_s, "one of them has waited, and once"


@by_kernels_and_torch
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [(3, 5), (0, 1), (4, 0), (700, 1_500), (2, 0, 9, 1)])
@pytest.mark.parametrize("each", [1, 2])
def test_groups_gather_their_rows_and_reduce_them(
    each: int, rows: tuple[int, ...], dtype: torch.dtype, plain: bool
) -> None:
    """Also of more rows than a buffer has room for."""
    ranks, width, total = each * len(rows), 300, sum(rows)

    def own_rows(group: int) -> Tensor:
        return given(group, rows[group] * width, dtype).view(rows[group], width)

    def summand(rank: int) -> Tensor:
        return given(10 + rank, total * width, dtype).view(total, width)

    def body(mesh: Mesh, ranks: Ranks) -> tuple[Tensor, Tensor, Tensor]:
        group = mesh.rank // each
        numbers, gathered = torch.empty((total, 1), dtype=torch.int64), torch.empty((total, width), dtype=dtype)
        own = [torch.full((rows[group], 1), group), own_rows(group)]
        ranks.gather_rows(own, rows, [numbers, gathered])
        reduced = torch.empty((rows[group], width), dtype=dtype)
        ranks.reduce_rows(summand(mesh.rank), rows, reduced)
        return numbers, gathered, reduced

    whole = torch.cat([own_rows(group) for group in range(len(rows))])
    sums = sum(summand(rank).float() for rank in range(ranks))
    assert isinstance(sums, Tensor)
    for rank, (numbers, gathered, reduced) in enumerate(run_ranks(ranks, body, plain=plain)):
        assert numbers[:, 0].tolist() == [group for group, count in enumerate(rows) for _ in range(count)]
        assert torch.equal(gathered, whole)
        assert torch.equal(reduced, sums.to(dtype).split(list(rows))[rank // each])
