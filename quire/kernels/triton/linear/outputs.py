"""Tiles of outputs of products of few rows: where each lies, who of its programs is the last, how it is written."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launching.launch import cdiv
from quire.kernels.triton.linear.products import gated, weight_rows

_MOST_TILES = 65_536
"""Of a product whose tiles have several programs."""


def tiles_of(y: Tensor, block_m: int, block_n: int, gate: bool) -> int:
    """How many tiles of block_m rows of x and block_n rows of W make y [rows, outputs]."""
    rows, outputs = y.shape
    return cdiv(outputs, block_n // 2 if gate else block_n) * cdiv(rows, block_m)


def arrivals(tiles: int, device: torch.device) -> Tensor:
    """[tiles or more] int32: how many programs of each tile are done. Zeros whenever no product is under way, for the
    last program of a tile puts them back; products of a device run one after another, on one stream."""
    assert tiles <= _MOST_TILES
    return _counters(device)


@functools.cache
def _counters(device: torch.device) -> Tensor:
    return torch.zeros(_MOST_TILES, dtype=torch.int32, device=device)


@triton.jit
def tile_at(tile, down, outputs, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GATED: tl.constexpr):
    """A tile's first output, its rows of x [BLOCK_M], and its rows of the weight [BLOCK_N].

    Those with the same rows of the weight, `down` of them, have numbers side by side.
    """
    begin = tile // down * (BLOCK_N // 2 if GATED else BLOCK_N)
    m = tile % down * BLOCK_M + tl.arange(0, BLOCK_M)
    return begin, m, weight_rows(begin, outputs, BLOCK_N, GATED)


@triton.jit
def write_tile(
    sums,
    bias,
    y,
    m,
    w_rows,
    begin,
    rows,
    outputs,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GATED: tl.constexpr,
    BIASED: tl.constexpr,
):
    """What sums [BLOCK_M, BLOCK_N] make of y [rows, outputs]."""
    MADE: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    if BIASED:
        sums += tl.load(bias + w_rows).to(tl.float32)[None, :]
    if GATED:
        sums = gated(sums, BLOCK_M, MADE)
    n = begin + tl.arange(0, MADE)
    inside = (m < rows)[:, None] & (n < outputs)[None, :]
    tl.store(y + m.to(tl.int64)[:, None] * outputs + n[None, :], sums.to(y.dtype.element_ty), inside)
