"""Steps of single tokens in one kernel against the reference: what comes out, and what the cache holds then."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from quire.kernels.reference import decode_step as reference
from quire.kernels.reference import paged_rows
from quire.kernels.triton.attention import decode
from quire.kernels.triton.attention import decode_step as ours
from tests.kernels.triton.attention.paged import NAN, Paged, assert_near, paged


@dataclass(frozen=True)
class Case:
    """A step; `turning` dimensions of a head turn, and `norm` is its weight's dtype."""

    heads: int
    kv_heads: int
    d: int
    dtype: torch.dtype = torch.float32
    turning: int = 0
    norm: torch.dtype | None = None
    block_size: int = 16
    window: int | None = None
    cap: float | None = None


def fresh(lengths: list[int], case: Case, device: str) -> tuple[Paged, Tensor]:
    """Caches that have all but each row's last token, and where these go; that is NaN."""
    cache = paged(lengths, case.block_size, case.kv_heads, case.d, case.dtype, device, case.window)
    last = torch.tensor(lengths, device=device) - 1
    places = cache.table[torch.arange(len(lengths), device=device), last // case.block_size] * case.block_size
    places += last % case.block_size
    for kept in (cache.keys, cache.values):
        kept.flatten(0, 1)[places] = NAN
    return cache, places


def check(lengths: list[int], case: Case, device: str, room: int | None = None) -> None:
    cache, places = fresh(lengths, case, device)
    copy = Paged(cache.keys.clone(), cache.values.clone(), cache.table)
    rows, heads, kv_heads, d = len(lengths), case.heads, case.kv_heads, case.d
    wide = torch.randn(rows, heads + 2 * kv_heads + 3, d).to(case.dtype).to(device)  # tokens may lie apart
    qkv = wide[:, : heads + 2 * kv_heads]
    norm = None if case.norm is None else (1 + 0.3 * torch.randn(heads + kv_heads, d)).to(case.norm).to(device)
    angle = 10 * torch.randn(rows, case.turning // 2, device=device)
    cos, sin = (None, None) if not case.turning else (angle.cos().to(case.dtype), angle.sin().to(case.dtype))
    starts, slots = torch.tensor(lengths, device=device) - 1, torch.arange(rows, device=device)
    tile = decode.keys_of_tile(d, wide.element_size())
    pieces = torch.empty((room or rows + 6, 8), dtype=torch.int32, device=device)
    decode.cut_contexts(starts, slots, None, None, case.window, tile, pieces)
    partials = paged_rows.new_partials(len(pieces), heads, kv_heads, d, torch.device(device))
    partials.outputs.fill_(NAN)
    partials.sums.fill_(NAN)
    found, expected = (torch.full((rows, heads, d), NAN, dtype=case.dtype, device=device) for _ in range(2))
    rule, rest = (norm, 1e-3, cos, sin), (pieces, partials)
    for _ in range(2):  # counters are ready again
        ours.rotate_and_attend(qkv, *rule, *vars(cache).values(), *rest, found, d**-0.5, case.cap)
    reference.rotate_and_attend(qkv, *rule, *vars(copy).values(), *rest, expected, d**-0.5, case.cap)
    assert_near(found, expected)
    assert not partials.arrived.any()
    assert torch.equal(cache.values.nan_to_num(), copy.values.nan_to_num())  # copied
    keys, same = (kept.flatten(0, 1)[places] for kept in (cache.keys, copy.keys))
    unit = torch.finfo(case.dtype).eps * float(same.float().abs().max())  # see test_rotary
    torch.testing.assert_close(keys, same, rtol=0, atol=4 * unit)
    for kept, other in ((cache.keys, copy.keys), (cache.values, copy.values)):
        assert torch.equal(kept.isnan(), other.isnan())
        kept.flatten(0, 1)[places] = other.flatten(0, 1)[places] = 0
        assert torch.equal(kept.nan_to_num(), other.nan_to_num())  # nothing else is touched


@pytest.mark.parametrize(
    ("dtype", "norm"),
    [(torch.float32, None), (torch.float32, torch.float32), (torch.bfloat16, None), (torch.bfloat16, torch.bfloat16)],
)
@pytest.mark.parametrize(("d", "turning"), [(64, 0), (80, 32), (80, 80), (128, 128), (256, 64)])
def test_widths_of_heads(d: int, turning: int, norm: torch.dtype | None, dtype: torch.dtype, device: str) -> None:
    check([1, 33, 70], Case(2, 1, d, dtype, turning, norm), device)


def test_a_wide_norm_of_narrow_heads(device: str) -> None:
    check([1, 40], Case(4, 2, 48, torch.bfloat16, 48, torch.float32), device)


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (3, 1), (8, 2), (14, 2), (15, 1), (16, 1), (32, 2)])
def test_sizes_of_groups(heads: int, kv_heads: int, device: str) -> None:
    check([70, 5], Case(heads, kv_heads, 16, turning=16, norm=torch.float32), device)


@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("window", [None, 1, 7, 33, 100])
def test_block_sizes_and_windows(block_size: int, window: int | None, device: str) -> None:
    """Rows whose last piece has nothing but the new token, and such as begin a block with it."""
    lengths = [1, 2, 32, 33, 97, 150]
    check(lengths, Case(2, 1, 16, turning=8, block_size=block_size, window=window), device, room=12)


@pytest.mark.parametrize("cap", [0.5, 30.0])
def test_scores_are_bounded(cap: float, device: str) -> None:
    check([90, 4], Case(4, 2, 16, turning=16, cap=cap), device)


@pytest.mark.parametrize("room", [1, 2, 3, 12, 40])
def test_merging(room: int, device: str) -> None:
    """One piece to a row; as many as eight, which are read at once; more."""
    check([385], Case(4, 2, 16, turning=16), device, room=room)


@pytest.mark.parametrize("rows", [17, 60])
def test_many_rows(rows: int, device: str) -> None:
    check([1 + 7 * row % 40 for row in range(rows)], Case(1, 1, 16, turning=16), device)


def test_a_row_that_is_not_a_number_is_alone(device: str) -> None:
    lengths, case = [40, 40, 40], Case(2, 1, 16)
    cache, _ = fresh(lengths, case, device)
    pieces = torch.empty((5, 8), dtype=torch.int32, device=device)
    starts = torch.full((3,), 39, device=device)
    decode.cut_contexts(starts, torch.arange(3, device=device), None, None, None, 32, pieces)
    partials = paged_rows.new_partials(5, 2, 1, 16, torch.device(device))
    qkv, out = torch.randn(3, 4, 16, device=device), torch.empty(3, 2, 16, device=device)
    qkv[1, 2] = NAN  # its key
    ours.rotate_and_attend(qkv, None, 0.0, None, None, *vars(cache).values(), pieces, partials, out, 0.25)
    assert out[1].isnan().all()
    assert out[0].isfinite().all()
    assert out[2].isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [[190] * 32, [1000] * 256, [130_000], [4096] * 32, [1, 100_000, *range(500, 900)]])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "d", "norm"),
    [(32, 8, 128, None), (16, 8, 128, torch.bfloat16), (14, 2, 64, None), (8, 4, 256, torch.float32)],
)
def test_real_sizes(lengths: list[int], heads: int, kv_heads: int, d: int, norm: torch.dtype | None) -> None:
    check(lengths, Case(heads, kv_heads, d, torch.bfloat16, d, norm), "cuda", room=len(lengths) + 33)
