"""The two inner loops of all matrix products here, for weights that are read once: what limits them is memory.

`gemv_loop` multiplies one vector with a few rows of a weight on the ordinary arithmetic units. `gemm_loop`
multiplies a tile of rows of x with a tile of rows of a weight on the tensor cores. A tensor core of sm_90 takes 64 rows
of its first operand but as few as 8 of its second, so for few rows of x the weight goes first (SWAPPED) and nothing is
wasted on rows that are not there.

Weights are [outputs, columns] with the columns side by side, as checkpoints have them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.compute.kernels.triton.launching.dependent_launch import wait_for_inputs


@triton.jit
def gemv_loop(
    sums,
    x,
    w,
    rows,
    scale,
    COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WAIT: tl.constexpr,
):
    """sums [rows, BLOCK_K] fp32, plus the products of scale · x [COLUMNS] and w's rows, not yet summed over BLOCK_K.

    The next part of w is asked for before the last one is used, and the first, where WAIT, before x is there.
    """
    k = tl.arange(0, BLOCK_K)
    whole: tl.constexpr = COLUMNS % BLOCK_K == 0
    pointers = w + rows[:, None] * COLUMNS + k[None, :]
    if whole:
        ahead = tl.load(pointers, eviction_policy="evict_first")
    else:
        ahead = tl.load(pointers, (k < COLUMNS)[None, :], 0.0, eviction_policy="evict_first")
    wait_for_inputs(WAIT)
    for begin in tl.static_range(0, COLUMNS, BLOCK_K):
        part = ahead
        if begin + BLOCK_K < COLUMNS:
            pointers += BLOCK_K
            if whole:
                ahead = tl.load(pointers, eviction_policy="evict_first")
            else:
                ahead = tl.load(pointers, (begin + BLOCK_K + k < COLUMNS)[None, :], 0.0, eviction_policy="evict_first")
        if whole:
            values = tl.load(x + begin + k)
        else:
            values = tl.load(x + begin + k, begin + k < COLUMNS, 0.0)
        sums += part.to(tl.float32) * (values.to(tl.float32) * scale)[None, :]
    return sums


@triton.jit
def gemm_loop(
    x,
    x_rows,
    x_mask,
    w,
    w_rows,
    columns,
    first,
    last,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WHOLE: tl.constexpr,
    SWAPPED: tl.constexpr,
):
    """[BLOCK_M, BLOCK_N] fp32: rows of x by rows of w over the steps first to last of BLOCK_K columns.

    Args:
        x_rows, w_rows: Where each row begins, int64.
        x_mask: Which rows of x there are; the others count as zeros.
        columns: How many there are; WHOLE says that BLOCK_K divides them.
    """
    k = first * BLOCK_K + tl.arange(0, BLOCK_K)
    x_pointers = x + x_rows[:, None] + k[None, :]
    w_pointers = w + w_rows[:, None] + k[None, :]
    if SWAPPED:
        sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(first, last):
        if WHOLE:
            a = tl.load(x_pointers, x_mask[:, None], 0.0)
            b = tl.load(w_pointers, eviction_policy="evict_first")
        else:
            inside = (step * BLOCK_K + tl.arange(0, BLOCK_K) < columns)[None, :]
            a = tl.load(x_pointers, x_mask[:, None] & inside, 0.0)
            b = tl.load(w_pointers, inside, 0.0, eviction_policy="evict_first")
        if SWAPPED:
            sums = tl.dot(b, tl.trans(a), sums, input_precision="ieee")
        else:
            sums = tl.dot(a, tl.trans(b), sums, input_precision="ieee")
        x_pointers += BLOCK_K
        w_pointers += BLOCK_K
    if SWAPPED:
        sums = tl.trans(sums)
    return sums


@triton.jit
def fetch_ahead(w, w_rows, begin, columns, BLOCK_N: tl.constexpr, LENGTH: tl.constexpr):
    """Bring the columns from `begin` on of rows of a weight to the GPU's cache while x is not there yet."""
    LINE: tl.constexpr = 1024 // w.dtype.element_ty.primitive_bitwidth  # 128 bytes
    k = tl.minimum(begin + tl.arange(0, LENGTH // LINE) * LINE, columns - 1)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [w + w_rows[:, None] + k[None, :]],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def gated(sums, ROWS: tl.constexpr, PAIRS: tl.constexpr):
    """[ROWS, PAIRS]: silu(gate) · up, of sums [ROWS, 2 · PAIRS] in which each gate stands before its up."""
    gate, up = gates_and_ups(sums, ROWS, PAIRS)
    return silu_times(gate, up)


@triton.jit
def gates_and_ups(sums, ROWS: tl.constexpr, PAIRS: tl.constexpr):
    """[ROWS, PAIRS] twice, of the same sums."""
    return tl.split(tl.reshape(sums, (ROWS, PAIRS, 2)))


@triton.jit
def silu_times(gate, up):
    """silu(gate) · up."""
    return gate * tl.sigmoid(gate) * up


@triton.jit
def weight_rows(begin, width, BLOCK: tl.constexpr, GATED: tl.constexpr):
    """[BLOCK] int64: which rows of a weight make the outputs from `begin`; past the end the last one again.

    GATED, the weight has `width` rows of gates and as many ups, and BLOCK rows make BLOCK / 2 outputs: gate, up, gate,
    up, so that both of an output meet in one thread's registers.
    """
    number = tl.arange(0, BLOCK)
    if GATED:
        rows = tl.minimum(begin + number // 2, width - 1) + number % 2 * width
    else:
        rows = tl.minimum(begin + number, width - 1)
    return rows.to(tl.int64)
