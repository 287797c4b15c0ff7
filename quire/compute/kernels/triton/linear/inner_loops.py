"""The two inner loops of all matrix products here, which read weights once and are limited by memory.

`gemv_loop` multiplies one vector by a few rows of a weight on the ordinary arithmetic units. `gemm_loop` multiplies a
tile of rows of x by a tile of rows of a weight on the tensor cores. A tensor core of sm_90 takes 64 rows of its first
operand but as few as 8 of its second, so for few rows of x the weight goes first (SWAPPED), which wastes no work on
rows that do not exist. Weights are [outputs, columns] with the columns side by side, as in checkpoints.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.compute.kernels.triton.launching.dependent_launch import wait_for_inputs


@triton.jit
def gemv_loop(
    sums, x, w, rows, COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr, WAIT: tl.constexpr, w_scales=None,
    W_GROUP: tl.constexpr = 0,
):  # fmt: skip
    """Return sums [rows, BLOCK_K] fp32 plus the products of x [COLUMNS] and w's rows, not yet summed over BLOCK_K.

    Each part of w is requested before the previous part is used; if WAIT, the first one before x is complete. Where
    W_GROUP columns share a scale, the scales of each row begin at w_scales [rows]; W_GROUP divides BLOCK_K.
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
        products = part.to(tl.float32) * values.to(tl.float32)[None, :]
        if W_GROUP > 0:
            products = scaled_by_group(products, w_scales, begin, COLUMNS, (rows.shape[0], BLOCK_K // W_GROUP, W_GROUP))
        sums += products
    return sums


@triton.jit
def scaled_by_group(products, w_scales, begin, COLUMNS: tl.constexpr, APART: tl.constexpr):
    """Return products [..., BLOCK_K] of the columns from `begin` on times their scales, which begin at w_scales [...].

    APART is the shape [..., groups, columns that share a scale].
    """
    GROUPS: tl.constexpr = APART[len(APART) - 2]
    GROUP: tl.constexpr = APART[len(APART) - 1]
    number = tl.minimum(begin // GROUP + tl.arange(0, GROUPS), (COLUMNS - 1) // GROUP)
    scales = tl.load(tl.expand_dims(w_scales, -1) + number)
    return tl.reshape(tl.reshape(products, APART) * tl.expand_dims(scales, -1), products.shape)


@triton.jit
def gemm_loop(
    x, x_rows, x_mask, w, w_rows, columns, first, last, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, WHOLE: tl.constexpr, SWAPPED: tl.constexpr, x_scales=None, w_scales=None,
    X_GROUP: tl.constexpr = 0, W_GROUP: tl.constexpr = 0, FAST: tl.constexpr = False,
):  # fmt: skip
    """Return [BLOCK_M, BLOCK_N] fp32: rows of x by rows of w over the steps first to last of BLOCK_K columns.

    Scales of groups of columns multiply the sums of a step, while the next step's scales are on their way; scales of
    whole rows are left to the caller. Sums of 8-bit floats leave the tensor cores, which add fewer bits than fp32 has,
    after each step; if FAST, only at the end.

    Args:
        x_rows, w_rows: Where each row begins, int64.
        x_mask: Which rows of x exist; the others count as zeros.
        columns: The number of columns; WHOLE says that BLOCK_K divides it.
        x_scales, w_scales: [BLOCK_M] and [BLOCK_N], where each row's scales begin: one for X_GROUP or W_GROUP columns,
            which BLOCK_K divides; 0: there are no scales.
    """
    IN_8_BITS: tl.constexpr = w.dtype.element_ty.primitive_bitwidth == 8
    KIND: tl.constexpr = tl.int32 if w.dtype.element_ty == tl.int8 else tl.float32
    IMPRECISE: tl.constexpr = BLOCK_K if IN_8_BITS and not FAST else None
    BY_STEP: tl.constexpr = X_GROUP > 0 or W_GROUP > 0
    k = first * BLOCK_K + tl.arange(0, BLOCK_K)
    x_pointers = x + x_rows[:, None] + k[None, :]
    w_pointers = w + w_rows[:, None] + k[None, :]
    none = tl.zeros((BLOCK_N, BLOCK_M) if SWAPPED else (BLOCK_M, BLOCK_N), KIND)
    sums = none.to(tl.float32) if BY_STEP else none
    if X_GROUP > 0:
        next_of_x = tl.load(x_scales + first * BLOCK_K // X_GROUP, x_mask, 0.0)
    if W_GROUP > 0:
        next_of_w = tl.load(w_scales + first * BLOCK_K // W_GROUP)
    for step in range(first, last):
        if WHOLE:
            a = tl.load(x_pointers, x_mask[:, None], 0.0)
            b = tl.load(w_pointers, eviction_policy="evict_first")
        else:
            inside = (step * BLOCK_K + tl.arange(0, BLOCK_K) < columns)[None, :]
            a = tl.load(x_pointers, x_mask[:, None] & inside, 0.0)
            b = tl.load(w_pointers, inside, 0.0, eviction_policy="evict_first")
        if BY_STEP:
            following = tl.minimum(step + 1, last - 1) * BLOCK_K
            if X_GROUP > 0:
                of_x = next_of_x
                next_of_x = tl.load(x_scales + following // X_GROUP, x_mask, 0.0)
            if W_GROUP > 0:
                of_w = next_of_w
                next_of_w = tl.load(w_scales + following // W_GROUP)
            if SWAPPED:
                part = tl.dot(b, tl.trans(a), none, out_dtype=KIND).to(tl.float32)
            else:
                part = tl.dot(a, tl.trans(b), none, out_dtype=KIND).to(tl.float32)
            if X_GROUP > 0 and W_GROUP > 0:
                sums += part * (of_w[:, None] * of_x[None, :] if SWAPPED else of_x[:, None] * of_w[None, :])
            elif X_GROUP > 0:
                sums += part * (of_x[None, :] if SWAPPED else of_x[:, None])
            else:
                sums += part * (of_w[:, None] if SWAPPED else of_w[None, :])
        elif SWAPPED:
            sums = tl.dot(b, tl.trans(a), sums, input_precision="ieee", max_num_imprecise_acc=IMPRECISE, out_dtype=KIND)
        else:
            sums = tl.dot(a, tl.trans(b), sums, input_precision="ieee", max_num_imprecise_acc=IMPRECISE, out_dtype=KIND)
        x_pointers += BLOCK_K
        w_pointers += BLOCK_K
    if SWAPPED:
        sums = tl.trans(sums)
    return sums.to(tl.float32)


@triton.jit
def fetch_ahead(w, w_rows, begin, columns, BLOCK_N: tl.constexpr, LENGTH: tl.constexpr):
    """Bring LENGTH columns of rows of a weight, from `begin` on, to the GPU's cache before x is complete."""
    LINE: tl.constexpr = 1024 // w.dtype.element_ty.primitive_bitwidth  # 128 bytes
    LINES: tl.constexpr = LENGTH // LINE if LENGTH > LINE else 1
    k = tl.minimum(begin + tl.arange(0, LINES) * LINE, columns - 1)
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
    """Return silu(gate) · up [ROWS, PAIRS] of sums [ROWS, 2 · PAIRS] in which each gate stands before its up."""
    gate, up = gates_and_ups(sums, ROWS, PAIRS)
    return silu_times(gate, up)


@triton.jit
def gates_and_ups(sums, ROWS: tl.constexpr, PAIRS: tl.constexpr, RUN: tl.constexpr = 1):
    """Return gates and ups, [ROWS, PAIRS] each, of sums in the order of `weight_rows`."""
    if RUN == 1:
        return tl.split(tl.reshape(sums, (ROWS, PAIRS, 2)))
    gate, up = tl.split(tl.permute(tl.reshape(sums, (ROWS, PAIRS // RUN, 2, RUN)), (0, 1, 3, 2)))
    return tl.reshape(gate, (ROWS, PAIRS)), tl.reshape(up, (ROWS, PAIRS))


@triton.jit
def silu_times(gate, up):
    return gate * tl.sigmoid(gate) * up


@triton.jit
def weight_rows(begin, width, BLOCK: tl.constexpr, GATED: tl.constexpr, RUN: tl.constexpr = 1):
    """Return [BLOCK] int64, the rows of a weight for the outputs from `begin` on; past the end, the last row repeats.

    If GATED, the weight has `width` rows of gates and as many rows of ups, and BLOCK rows make BLOCK / 2 outputs: RUN
    gates, as many ups, and so on, so that the gate and up of an output meet in one thread's registers. With tensor
    cores a thread has the sums of two neighbours, and of the same two among the next eight rows.
    """
    number = tl.arange(0, BLOCK)
    if GATED:
        output = number // (2 * RUN) * RUN + number % RUN
        rows = tl.minimum(begin + output, width - 1) + number // RUN % 2 * width
    else:
        rows = tl.minimum(begin + number, width - 1)
    return rows.to(tl.int64)
