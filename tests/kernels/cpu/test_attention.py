"""Paged attention, and what comes before it, equal their references on odd shapes."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from quire.kernels.cpu.rowwise_attention import paged_attention, qk_norm_rope_and_cache
from quire.kernels.reference import rowwise_attention as reference

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}

pytestmark = pytest.mark.usefixtures("instructions")


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Case:
    heads: int
    kv_heads: int
    d: int
    block_size: int
    rows: tuple[tuple[int, int], ...]  # tokens before the step and in it
    window: int | None = None
    cap: float | None = None


MIXED = ((0, 1), (63, 1), (64, 1), (200, 1), (0, 130), (17, 40), (5, 0), (90, 2))
CASES = [
    Case(8, 8, 64, 16, MIXED),
    Case(4, 2, 32, 8, MIXED),
    Case(6, 2, 96, 32, MIXED, window=50),
    Case(8, 2, 128, 16, MIXED, cap=3.0),
    Case(16, 2, 80, 16, MIXED),
    Case(6, 6, 48, 16, MIXED),
    Case(8, 2, 16, 16, MIXED, window=70),
    Case(5, 1, 40, 8, MIXED, window=7, cap=2.0),
    Case(4, 1, 256, 16, MIXED, window=64),
    Case(2, 2, 112, 16, ((0, 3), (70, 1)), window=1),
    Case(96, 1, 64, 16, ((10, 5), (3, 1))),
    Case(3, 1, 64, 16, ((4999, 1), (4900, 90))),
    Case(2, 1, 64, 32, ((4999, 1), (3000, 70)), window=1000),
]


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_paged_attention(case: Case, dtype: torch.dtype) -> None:
    """Blocks lie anywhere, and what no token sees is NaN."""
    blocks = [-(-(before + count) // case.block_size) for before, count in case.rows]
    total = sum(blocks) + 1
    shape = (total, case.block_size, case.kv_heads, case.d)
    keys, values = torch.full(shape, float("nan"), dtype=dtype), torch.full(shape, float("nan"), dtype=dtype)
    order = (torch.randperm(total - 1, generator=torch.Generator().manual_seed(0)) + 1).split(blocks)
    table = torch.zeros(len(case.rows), max(blocks) + 2, dtype=torch.int64)
    slots = torch.arange(len(case.rows)).flip(0)
    for slot, own, (before, count) in zip(slots.tolist(), order, case.rows, strict=True):
        table[slot, : len(own)] = own
        first = 0 if case.window is None else max(0, before + 1 - case.window)
        position = torch.arange(first, before + count)
        where = own[position // case.block_size], position % case.block_size
        keys[where] = normal(len(position), case.kv_heads, case.d, seed=slot).to(dtype)
        values[where] = normal(len(position), case.kv_heads, case.d, seed=slot + 100).to(dtype)
    starts, counts = (torch.tensor(column) for column in zip(*case.rows, strict=True))
    q = normal(int(counts.sum()), case.heads, case.d, seed=7).to(dtype)
    out, expected = torch.full_like(q, float("nan")), torch.empty(q.shape)
    rows = (table, slots, starts, counts, case.window)
    paged_attention(q, keys, values, *rows, out, case.d**-0.5, case.cap)
    reference.paged_attention(q.float(), keys.float(), values.float(), *rows, expected, case.d**-0.5, case.cap)
    torch.testing.assert_close(out.float(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("cap", [None, 30.0])
@pytest.mark.parametrize("heads", [1, 8])
@pytest.mark.parametrize("where", ["query", "key", "value"])
def test_a_nan_in_sight_is_not_hidden(
    dtype: torch.dtype, cap: float | None, heads: int, where: str, instructions: str
) -> None:
    """One head goes over keys where they lie, eight gather them."""
    if instructions == "none":
        pytest.skip("torch's attention may write 0 where all scores are NaN")
    d = 64
    q = normal(1, heads, d, seed=0).to(dtype)
    keys, values = normal(2, 16, 1, d, seed=1).to(dtype), normal(2, 16, 1, d, seed=2).to(dtype)
    if where == "query":
        q[0, :, 3] = float("nan")
    else:
        {"key": keys, "value": values}[where][1, 5, 0] = float("nan")
    rows = (torch.tensor([[1, 0]]), torch.tensor([0]), torch.tensor([9]), torch.tensor([1]), None)
    out = torch.zeros_like(q)
    paged_attention(q, keys, values, *rows, out, d**-0.5, cap)
    assert out.isnan().all()


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(("d", "rotated"), [(64, 64), (80, 32), (40, 40), (128, 0), (256, 256)])
@pytest.mark.parametrize("tokens", [1, 37])
def test_qk_norm_rope_and_cache(dtype: torch.dtype, wide: bool, d: int, rotated: int, tokens: int) -> None:
    """With a norm in x's dtype, in fp32, and without one; all heads or a part of each is rotated."""
    heads, kv_heads = 5, 2
    qkv = normal(tokens, heads + 2 * kv_heads, d, seed=0).to(dtype)
    angle = normal(tokens, rotated // 2, seed=1) * 3
    cos, sin = (angle.cos().to(dtype), angle.sin().to(dtype)) if rotated else (None, None)
    weight = normal(heads + kv_heads, d, seed=2).to(torch.float32 if wide else dtype)
    places = torch.randperm(48, generator=torch.Generator().manual_seed(3))[:tokens]
    for norm in (None, weight):
        found = [torch.zeros(6, 8, kv_heads, d, dtype=dtype) for _ in range(2)]
        expected = [torch.zeros(6, 8, kv_heads, d, dtype=dtype) for _ in range(2)]
        q, expected_q = (torch.empty(tokens, heads, d, dtype=dtype) for _ in range(2))
        qk_norm_rope_and_cache(qkv, norm, 1e-5, cos, sin, *found, places, q)
        reference.qk_norm_rope_and_cache(qkv, norm, 1e-5, cos, sin, *expected, places, expected_q)
        for own, other in zip((*found, q), (*expected, expected_q), strict=True):
            torch.testing.assert_close(own, other, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
