"""Triton's low-rank updates against the reference, and the tiles that they work on."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.compute.kernels.reference import lora as reference
from quire.compute.kernels.reference import rowwise_attention
from quire.compute.kernels.reference.attention_inputs import CacheWrite, PagedKV, QKNormRope
from quire.compute.kernels.reference.lora import LowRankWeights, RowUpdate, Scaling, Tiles
from quire.compute.kernels.triton import lora as ours
from quire.compute.kernels.triton.attention.qk_norm_rope import qk_norm_rope_and_cache
from quire.compute.kernels.triton.lora_linear import linear_and_shrink
from quire.compute.kernels.triton.lora_norm import lora_rms_norm
from quire.models.lora.step_tiles import GPU_TILE, max_tiles, tile_tokens

NEAR = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def random_weights(
    slots: int, rank: int, columns: int, rows: tuple[int, ...], dtype: torch.dtype, device: str
) -> LowRankWeights:
    """Adapters side by side in one memory, as on a device; slot 2 leaves the product alone, 3 scales its outputs."""
    a_size, b_size = len(rows) * rank * columns, sum(rows) * rank
    outputs = sum(rows)
    memory = torch.randn(slots, 32 + a_size + b_size + 2 * outputs, device=device).to(dtype) / 4
    a = memory[:, 32 : 32 + a_size].view(slots, len(rows) * rank, columns)
    b = memory[:, 32 + a_size : 32 + a_size + b_size].view(slots, outputs, rank)
    factors, summands = memory[:, -2 * outputs :].split(outputs, dim=1)
    ranks = torch.zeros(slots, 3, dtype=torch.int64, device=device)
    ranks[2, 2] = 1
    for slot in range(slots):
        used = 0 if slot == 1 else min(rank, 4 + 9 * slot)
        ranks[slot, 1] = used
        a[slot].view(len(rows), rank, columns)[:, used:] = 0
        b[slot, :, used:] = 0
    return LowRankWeights(a, b, ranks[:, 1], rows, Scaling(factors, summands, ranks[:, 2]))


def tiles_of(slots: list[int], device: str, padding: int = 0) -> Tiles:
    own, rows = tile_tokens(np.array(slots, dtype=np.int64), GPU_TILE)
    own = np.concatenate((own, np.zeros(padding, dtype=np.int64)))
    rows = np.concatenate((rows, np.full((padding, GPU_TILE), -1, dtype=np.int64)))
    columns = (torch.tensor(column, device=device) for column in (own, rows, slots))
    return Tiles(*columns)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("slots", "rank", "columns", "rows", "padding"),
    [
        ([1] * 3, 16, 100, (40,), 0),
        ([0, 1, 2, 3, 1, 0, 3, 3], 16, 1_100, (40, 8, 8), 5),
        ([1] * 20 + [0] * 3 + [3] * 18, 48, 64, (300, 290), 1),
        ([4, 0, 4, 1], 128, 600, (96,), 3),
        ([0, 0], 16, 64, (16,), 2),
    ],
)
def test_rows_are_changed_by_their_own_adapter(
    slots: list[int], rank: int, columns: int, rows: tuple[int, ...], padding: int, dtype: torch.dtype, device: str
) -> None:
    weights = random_weights(4, rank, columns, rows, dtype, device)
    tiles = tiles_of(slots, device, padding)
    x = torch.randn(len(slots), columns, device=device).to(dtype)
    y = torch.randn(len(slots), sum(rows), device=device).to(dtype)
    found, expected = y.clone(), y.clone()
    ours.lora_expand(ours.lora_shrink(x, weights, tiles), weights, tiles, found)
    reference.lora_expand(reference.lora_shrink(x, weights, tiles), weights, tiles, expected)
    alone = [i for i, slot in enumerate(slots) if slot in (0, 2)]
    assert torch.equal(found[alone], y[alone])
    assert (found.float() - expected.float()).abs().max() <= NEAR[dtype] * max(1.0, float(expected.float().abs().max()))
    changed = [i for i, slot in enumerate(slots) if slot not in (0, 2)]
    assert not changed or (found[changed] != y[changed]).any(dim=1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("slots", "rank", "rows", "padding"),
    [
        ([1] * 3, 16, (40, 40), 0),
        ([0] * 5, 16, (140, 140), 2),
        ([0, 1, 2, 3, 1, 0, 3, 3], 16, (280,), 5),
        ([1] * 20 + [0] * 40 + [3] * 18 + [4, 2], 48, (140, 140), 3),
    ],
)
def test_gated_rows_are_changed_by_their_own_adapter(
    slots: list[int], rank: int, rows: tuple[int, ...], padding: int, dtype: torch.dtype, device: str
) -> None:
    weights = random_weights(4, rank, 64, rows, dtype, device)
    tiles = tiles_of(slots, device, padding)
    x = torch.randn(len(slots), 64, device=device).to(dtype)
    y = torch.randn(len(slots), sum(rows), device=device).to(dtype)
    found, expected = (torch.full((len(slots), sum(rows) // 2), math.nan, dtype=dtype, device=device) for _ in range(2))
    ours.lora_expand_silu_and_mul(ours.lora_shrink(x, weights, tiles), weights, tiles, y.clone(), found)
    reference.lora_expand_silu_and_mul(reference.lora_shrink(x, weights, tiles), weights, tiles, y.clone(), expected)
    assert (found.float() - expected.float()).abs().max() <= NEAR[dtype] * max(1.0, float(expected.float().abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("slots", "rank", "width"),
    [
        ([1] * 3, 16, 64),
        ([0] * 5, 16, 64),
        ([0, 1, 2, 3, 1, 0, 3, 3], 16, 1_100),
        ([0, 1, 2, 3, 4], 48, 300),
        ([1, 0, 3] * 22, 16, 64),  # too many rows
        ([1, 0, 3], 16, 4_160),  # rows too wide
    ],
)
def test_norms_of_what_is_changed(slots: list[int], rank: int, width: int, dtype: torch.dtype, device: str) -> None:
    weights, tiles = random_weights(4, rank, 64, (width,), dtype, device), tiles_of(slots, device, 2)
    inner, x, delta = (torch.randn(len(slots), columns, device=device).to(dtype) for columns in (64, width, width))
    weight = torch.randn(width, device=device).to(dtype)
    found, expected = x.clone(), x.clone()
    normed, expected_normed = torch.empty_like(x), torch.empty_like(x)
    low = ours.lora_shrink(inner, weights, tiles)
    lora_rms_norm(low, weights, tiles, found, weight, 1e-5, normed, delta.clone())
    low = reference.lora_shrink(inner, weights, tiles)
    reference.lora_rms_norm(low, weights, tiles, expected, weight, 1e-5, expected_normed, delta.clone())
    for ours_, theirs in ((found, expected), (normed, expected_normed)):
        most = max(1.0, float(theirs.float().abs().max()))
        assert (ours_.float() - theirs.float()).abs().max() <= NEAR[dtype] * most


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("slots", "rank", "heads", "kv_heads", "d", "width", "merged"),
    [
        ([1] * 3, 16, 4, 2, 16, 16, False),
        ([0, 1, 2, 3, 1, 0, 3, 3], 16, 5, 1, 24, 8, False),
        ([0, 1, 2, 3, 4], 48, 2, 2, 20, 0, False),
        ([3, 0, 1], 16, 4, 2, 16, 16, True),
        ([1, 0, 3] * 22, 16, 2, 1, 16, 16, False),  # too many tokens
    ],
)
def test_heads_of_what_is_changed(
    slots: list[int],
    rank: int,
    heads: int,
    kv_heads: int,
    d: int,
    width: int,
    merged: bool,
    dtype: torch.dtype,
    device: str,
) -> None:
    """`width` dimensions turn."""
    tokens, outputs = len(slots), (heads * d, kv_heads * d, kv_heads * d)
    weights = random_weights(4, rank, 64, (sum(outputs),) if merged else outputs, dtype, device)
    tiles = tiles_of(slots, device)
    x, qkv, norm, angle = (
        torch.randn(*shape, device=device).to(dtype)
        for shape in ((tokens, 64), (tokens, sum(outputs)), (heads + kv_heads, d), (tokens, width // 2))
    )
    cos, sin = (angle.cos(), angle.sin()) if width else (None, None)
    places = torch.arange(tokens, device=device)
    results = []
    for module, kernel in ((ours, qk_norm_rope_and_cache), (reference, rowwise_attention.qk_norm_rope_and_cache)):
        cache = torch.zeros(2, tokens, 1, kv_heads, d, dtype=dtype, device=device)
        q = torch.zeros(tokens, heads, d, dtype=dtype, device=device)
        update = RowUpdate(module.lora_shrink(x, weights, tiles), weights, tiles)
        projected = qkv.clone().view(tokens, -1, d)
        kernel(projected, QKNormRope(norm, 1e-5, cos, sin, update), CacheWrite(PagedKV(*cache), places), q)
        results.append((cache, q))
    for found, expected in zip(*results, strict=True):
        most = max(1.0, float(expected.float().abs().max()))
        assert (found.float() - expected.float()).abs().max() <= NEAR[dtype] * most


def test_few_programs_work_through_many_tiles(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the last tiles come back for nothing."""
    weights = random_weights(9, 16, 64, (300,), torch.float32, device)
    slots = [number % 10 for number in range(30)]
    x, y = torch.randn(30, 64, device=device), torch.randn(30, 300, device=device)
    tiles = tiles_of(slots, device, 7)
    low = ours.lora_shrink(x, weights, tiles)
    gated = torch.empty(30, 150, device=device)
    pairs = []
    for programs in (1, 6, 9, 10_000):
        monkeypatch.setattr(ours, "_PROGRAMS", programs)
        found, out = y.clone(), torch.empty_like(gated)
        ours.lora_expand(low, weights, tiles, found)
        ours.lora_expand_silu_and_mul(low, weights, tiles, y.clone(), out)
        pairs.append((found, out))
    for found, out in pairs[:-1]:
        assert torch.equal(found, pairs[-1][0])
        assert torch.equal(out, pairs[-1][1])
    assert (pairs[-1][0] != y)[[number for number, slot in enumerate(slots) if slot not in (0, 2)]].any(dim=1).all()


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("tokens", [1, 9, 70])
def test_products_with_updates(tokens: int, gate: bool, device: str) -> None:
    dtype, rows = torch.bfloat16, (96, 96) if gate else (160, 16, 16)
    weights = random_weights(4, 16, 1_024, rows, dtype, device)
    slots = [number % 5 for number in range(tokens)]
    tiles = tiles_of(slots, device, 3)
    x = torch.randn(tokens, 1_024, device=device).to(dtype)
    w = (torch.randn(sum(rows), 1_024, device=device) / 32).to(dtype)
    bias = torch.randn(sum(rows), device=device).to(dtype)

    def with_updates(module: Any, linear_and_shrink: Any) -> Tensor:
        y, low = linear_and_shrink(x, w, bias, weights, tiles)
        if not gate:
            module.lora_expand(low, weights, tiles, y)
            assert isinstance(y, Tensor)
            return y
        out = y.new_empty((tokens, sum(rows) // 2))
        module.lora_expand_silu_and_mul(low, weights, tiles, y, out)
        return out

    expected = with_updates(reference, reference.linear_and_shrink)
    for _ in range(20 if device == "cuda" else 1):  # on a card the product does not wait for A x
        found = with_updates(ours, linear_and_shrink)
        most = max(1.0, float(expected.float().abs().max()))
        assert (found.float() - expected.float()).abs().max() <= NEAR[dtype] * most


def test_the_reference_is_b_times_a_times_x() -> None:
    """Of each module its own, for one adapter at a time; a scaled product is scaled before."""
    rows, rank = (6, 4), 16
    weights = random_weights(3, rank, 12, rows, torch.float64, "cpu")
    x, slots = torch.randn(5, 12, dtype=torch.float64), [3, 0, 1, 3, 2]
    y = torch.randn(5, 10, dtype=torch.float64)
    before = y.clone()
    tiles = tiles_of(slots, "cpu")
    reference.lora_expand(reference.lora_shrink(x, weights, tiles), weights, tiles, y)
    for token, slot in enumerate(slots):
        expected = torch.zeros(10, dtype=torch.float64)
        if slot:
            a, b = weights.a[slot - 1].view(2, rank, 12), weights.b[slot - 1]
            expected = torch.cat((b[:6] @ (a[0] @ x[token]), b[6:] @ (a[1] @ x[token])))
        if slot == 3:
            assert weights.scaling is not None
            expected += before[token] * (1 + weights.scaling.factors[2]) + weights.scaling.summands[2]
        else:
            expected = expected * bool(slot not in (0, 2)) + before[token]
        torch.testing.assert_close(y[token], expected)


@pytest.mark.parametrize("size", [1, 4, 16])
def test_tiles_have_each_token_once_and_those_without_an_adapter_last(size: int) -> None:
    luck = np.random.default_rng(7)
    for tokens in (1, 3, 40, 200):
        for adapters in (1, 3, 50):
            slots = luck.integers(0, adapters + 1, tokens)
            own, rows = tile_tokens(slots, size)
            assert len(own) == len(rows) <= max_tiles(tokens, tokens, adapters, rows.shape[1])
            assert sorted(rows[rows >= 0].tolist()) == list(range(tokens))
            assert (np.diff((own == 0).astype(int)) >= 0).all()
            for slot, tile in zip(own.tolist(), rows, strict=True):
                assert set(slots[tile[tile >= 0]].tolist()) == {slot}
                assert (np.diff((tile >= 0).astype(int)) <= 0).all()  # none behind the padding
            assert rows.shape[1] == size
