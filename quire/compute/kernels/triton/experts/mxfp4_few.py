"""Computes a mixture of experts in packed mxfp4 for few tokens of each expert, on Hopper.

A program has some tiles of 16 rows of an expert's weight, and at most 8 or 16 rows of x. Its warps take different
columns, and request many words before they use the first; a thread has in registers all that it multiplies, as in
packed_gemv.py. Memory is read once for each weight that a tile of pairs goes to.

For one or two tokens no pairs are grouped: a program of the first product has one pair, and in the second product the
warps of a program share a token's experts, so that the sum of these needs no other kernel. The second product requests
its weight before the first one ends.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from quire.compute.kernels.activations import SILU, Activation
from quire.compute.kernels.reference.experts import ExpertAdapters, ExpertBiases
from quire.compute.kernels.triton.experts.expert_adapters import added_rows
from quire.compute.kernels.triton.experts.expert_gemms import constants_of, sum_choices
from quire.compute.kernels.triton.experts.mxfp4_layout import PackedExperts, expansion
from quire.compute.kernels.triton.experts.routing import group_by_expert
from quire.compute.kernels.triton.launching.dependent_launch import release_dependents, wait_for_inputs
from quire.compute.kernels.triton.launching.launch import cdiv, fast_launch
from quire.compute.kernels.triton.linear.packed_gemm import along_first, along_second, along_third, barrier
from quire.compute.kernels.triton.linear.packed_layout import pairs_of

_EXPAND = gl.constexpr(expansion())
_SPLIT = gl.constexpr("mov.b32 $0, $2; mov.b32 $1, $3;")
"""Puts two words of pairs into a register each."""


@dataclass(frozen=True)
class FewConfig:
    """How the work is divided.

    Attributes:
        block_m: Rows of x of a tile, 8 or 16; 0: each program has a single pair, or the pairs of one token.
        units: Tiles of 64 columns that a warp multiplies in a step.
        warps: Warps of a program.
        tiles: Tiles of 16 rows of the weight of a program.
    """

    block_m: int
    units: int
    warps: int
    tiles: int


def mxfp4_few(
    x: Tensor,
    gate_up: PackedExperts,
    down: PackedExperts,
    numbers: Tensor,
    weights: Tensor,
    out: Tensor,
    configs: tuple[FewConfig, FewConfig],
    overlap: bool,
    partial: bool = False,
    adapters: ExpertAdapters | None = None,
    activation: Activation = SILU,
    biases: ExpertBiases | None = None,
) -> None:
    """Compute the op `experts`; arguments as in `gemv_by_pair`. With a block_m of 0 there are no adapters."""
    first, second = configs
    (tokens, hidden), chosen, width = x.shape, numbers.shape[1], down.columns
    in_pairs, pairs, experts = first.block_m == 0, numbers.numel(), len(down.words)
    middle = torch.empty((pairs, width), dtype=x.dtype, device=x.device)
    of_gate_up, of_down = biases or (None, None)
    order = tiles = numbers
    if not in_pairs:
        order, tiles = group_by_expert(numbers, experts, first.block_m)
    places = pairs if in_pairs else tiles.shape[1]
    added_to, adapted = added_rows(numbers, adapters), adapters is not None

    def launch(
        x: Tensor, w: PackedExperts, bias: Tensor | None, y: Tensor, config: FewConfig, mode: str, groups: int
    ) -> None:
        added, slots = added_to(x, y, w.gated)
        _few_kernel[(cdiv(w.rows // 16, config.tiles) * groups,)](
            pairs_of(x), w.words, w.scales, bias, numbers, order, tiles, weights, added, slots, y,
            groups, experts, CHOSEN=chosen, **constants_of(activation), ROWS=w.rows, UNITS=w.columns // 64,
            M=config.block_m or 8, C=config.units, W=config.warps, R=config.tiles, MODE=mode, FIRST=w.gated,
            PARTIAL=partial, ADAPTED=adapted, OVERLAP=overlap, num_warps=config.warps, launch_pdl=overlap,
        )  # fmt: skip

    launch(x, gate_up, of_gate_up, middle, first, "pair" if in_pairs else "tile", places)
    if in_pairs:
        launch(middle, down, of_down, out, second, "token", tokens)
        return
    parts = torch.empty((pairs, hidden), dtype=x.dtype, device=x.device)
    launch(middle, down, of_down, parts, second, "tile", places)
    sum_choices(parts, out, numbers, experts, overlap, partial)


@fast_launch
@gluon.jit(do_not_specialize=["places", "experts"], do_not_specialize_on_alignment=["slots"])
def _few_kernel(
    x, words, scales, biases, numbers, order, tiles, weights, added, slots, y, places, experts,
    CHOSEN: gl.constexpr, KIND: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr, ROWS: gl.constexpr,
    UNITS: gl.constexpr, M: gl.constexpr, C: gl.constexpr, W: gl.constexpr, R: gl.constexpr, MODE: gl.constexpr,
    FIRST: gl.constexpr, PARTIAL: gl.constexpr, ADAPTED: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """Compute the rows of R tiles of the weight, for a tile of pairs, a pair or a token."""
    place = gl.program_id(0) % places
    strip = gl.program_id(0) // places * R
    if FIRST:  # numbers and tiles come from the kernel before; in the second product from one that the first waited for
        wait_for_inputs(OVERLAP)
    release_dependents(OVERLAP)
    begin = 0
    end = 1
    expert = 0
    if MODE == "tile":
        begin = gl.load(tiles + places + place, cache_modifier=".cg")
        end = gl.load(tiles + 2 * places + place, cache_modifier=".cg")
        expert = gl.load(tiles + place, cache_modifier=".cg")
    if MODE == "pair":
        expert = gl.load(numbers + place, cache_modifier=".cg")
        if PARTIAL:
            end = gl.where(expert < experts, 1, 0)
    if begin < end:
        _multiply_rows(
            x, words, scales, biases, numbers, order, weights, added, slots, y, place, strip, begin, end, expert,
            experts, CHOSEN, KIND, ALPHA, LIMIT, ROWS, UNITS, M, C, W, R, MODE, FIRST, PARTIAL, ADAPTED, OVERLAP,
        )  # fmt: skip
    elif not FIRST:
        wait_for_inputs(OVERLAP)  # whoever waits for this kernel must see the work of those before it


@gluon.jit
def _multiply_rows(
    x, words, scales, biases, numbers, order, weights, added, slots, y, place, strip, begin, end, expert, experts,
    CHOSEN: gl.constexpr, KIND: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr, ROWS: gl.constexpr,
    UNITS: gl.constexpr, M: gl.constexpr, C: gl.constexpr, W: gl.constexpr, R: gl.constexpr, MODE: gl.constexpr,
    FIRST: gl.constexpr, PARTIAL: gl.constexpr, ADAPTED: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1, 1], [1, 16, 8])
    flat: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 1, 32], [W, 1, 1], [2, 1, 0])
    wide: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 8, 4], [W, 1, 1], [2, 1, 0])
    quads: gl.constexpr = gl.BlockedLayout([1, 1, 1, 4], [1, 1, 32, 1], [W, 1, 1, 1], [3, 2, 1, 0])
    of_quads: gl.constexpr = gl.SliceLayout(3, quads)
    STRIPS: gl.constexpr = ROWS // 16
    TOKEN: gl.constexpr = MODE == "token"
    PARTS: gl.constexpr = W // CHOSEN if TOKEN else W
    STEPS: gl.constexpr = (UNITS + PARTS * C - 1) // (PARTS * C) * C  # of each warp, in tiles
    EVEN: gl.constexpr = STEPS * PARTS == UNITS
    warp = along_first(W, flat)
    s_warp = along_first(W, of_quads)
    own = _own_expert(numbers, place, warp // PARTS, expert, experts, CHOSEN, TOKEN, PARTIAL)
    s_own = _own_expert(numbers, place, s_warp // PARTS, expert, experts, CHOSEN, TOKEN, PARTIAL)
    tile = own * STRIPS + (strip + along_second(R, flat))
    s_tile = s_own * STRIPS + (strip + along_second(R, of_quads))
    part = warp % PARTS * STEPS
    s_part = s_warp % PARTS * STEPS
    w_from = words + tile * (UNITS * 128) + (part * 128 + along_third(128, flat))
    s_from = scales + s_tile * (UNITS * 8) + (s_part * 8 + along_third(32, of_quads) // 4)
    now = _load_weight(w_from, s_from, part, s_part, 0, UNITS, C, EVEN)
    acc = _biases(
        biases, numbers, place, strip, expert, experts, CHOSEN, ROWS, M, W, R, PARTS, TOKEN, FIRST, PARTIAL, mma
    )
    if FIRST:
        barrier()  # or the assembler requests words one after the other
    else:
        wait_for_inputs(OVERLAP)
    x_warp = along_first(W, wide)
    m = along_second(M, wide)
    x_part = x_warp % PARTS * STEPS
    if MODE == "tile":
        pair = gl.load(order + begin + m, mask=begin + m < end, other=0)
        row = pair // CHOSEN if FIRST else pair
    elif TOKEN:
        row = place * CHOSEN + x_warp // PARTS + m * 0
    else:
        row = place // CHOSEN + m * 0
    x_mask = (begin + m < end) & (x_warp >= 0)
    if TOKEN and PARTIAL:  # nothing has written the rows of experts elsewhere
        x_mask &= gl.load(numbers + place * CHOSEN + x_warp // PARTS, cache_modifier=".cg") < experts
    x_from = x + row.to(gl.int64) * (UNITS * 32) + (x_part * 32 + along_third(32, wide))
    plain: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [1, W], [0, 1])
    to_m = begin + gl.arange(0, M, layout=gl.SliceLayout(0, plain))
    if MODE == "tile":
        to_pair = gl.load(order + to_m, mask=to_m < end, other=0)
    else:
        to_pair = place + to_m
    xs = _load_x(x_from, x_mask, x_part, 0, UNITS, C, EVEN)
    factor = _factors(
        numbers, weights, place, to_pair, to_m < end, experts, CHOSEN, W, PARTS, MODE, FIRST, PARTIAL, mma
    )
    if STEPS > C:
        for step in range(0, STEPS - C, C):
            before = now
            here = xs
            now = _load_weight(w_from, s_from, part, s_part, step + C, UNITS, C, EVEN)
            xs = _load_x(x_from, x_mask, x_part, step + C, UNITS, C, EVEN)
            acc = _multiply(before, here, acc, C, W, R, M, flat, quads, mma)
    acc = _multiply(now, xs, acc, C, W, R, M, flat, quads, mma)
    if TOKEN:
        acc *= gl.expand_dims(gl.expand_dims(factor, 1), 2)
    sums = gl.sum(acc, 0) * 9223372036854775808.0
    if FIRST:
        gate, up = gl.split(gl.permute(gl.reshape(sums, [R, 2, 8, M]), (0, 2, 3, 1)))
        gate = gl.convert_layout(gl.reshape(gate, [8 * R, M]), plain)
        up = gl.convert_layout(gl.reshape(up, [8 * R, M]), plain)
        write_gated(
            gate, up, added, slots, y, strip * 8, to_m, to_pair, end,
            CHOSEN, KIND, ALPHA, LIMIT, ROWS // 2, 8 * R, False, ADAPTED, plain,
        )  # fmt: skip
    elif TOKEN:
        write_rows(gl.convert_layout(sums, plain), y, strip * 16, to_pair, to_m < end, ROWS, 16 * R, plain)
    else:
        write_scaled(
            gl.convert_layout(sums, plain), factor, added, slots, y, strip * 16, to_m, to_pair, end,
            CHOSEN, ROWS, 16 * R, ADAPTED, plain,
        )  # fmt: skip


@gluon.jit
def _factors(
    numbers, weights, place, pair, there, experts, CHOSEN: gl.constexpr, W: gl.constexpr, PARTS: gl.constexpr,
    MODE: gl.constexpr, FIRST: gl.constexpr, PARTIAL: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """Return the router's weights: of each warp's expert for a token, else of each pair."""
    factor = 0.0
    if MODE == "token":
        own = place * CHOSEN + gl.arange(0, W, layout=gl.SliceLayout(1, gl.SliceLayout(2, mma))) // PARTS
        factor = gl.load(weights + own, cache_modifier=".cg").to(gl.float32)
        if PARTIAL:
            factor = gl.where(gl.load(numbers + own, cache_modifier=".cg") < experts, factor, 0.0)
    elif not FIRST:
        factor = gl.load(weights + pair, mask=there, other=0.0, cache_modifier=".cg").to(gl.float32)
    return factor


@gluon.jit
def _biases(
    biases, numbers, place, strip, expert, experts, CHOSEN: gl.constexpr, ROWS: gl.constexpr, M: gl.constexpr,
    W: gl.constexpr, R: gl.constexpr, PARTS: gl.constexpr, TOKEN: gl.constexpr, FIRST: gl.constexpr,
    PARTIAL: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """Return sums [W, 16 R, M] of the biases alone, which one warp of each expert begins with."""
    sums = gl.zeros([W, 16 * R, M], gl.float32, mma)
    if biases is not None:
        warp = gl.expand_dims(gl.arange(0, W, layout=gl.SliceLayout(1, gl.SliceLayout(2, mma))), 1)
        n = gl.expand_dims(gl.arange(0, 16 * R, layout=gl.SliceLayout(0, gl.SliceLayout(2, mma))), 0)
        row = strip * 16 + n
        if FIRST:
            row = (strip + n // 16) * 8 + n % 8 + n % 16 // 8 * (ROWS // 2)
        own = _own_expert(numbers, place, warp // PARTS, expert, experts, CHOSEN, TOKEN, PARTIAL)
        found = gl.load(biases + own * ROWS + row, mask=warp % PARTS + row * 0 == 0, other=0.0)
        sums += gl.expand_dims(found.to(gl.float32) * 1.0842021724855044e-19, 2)
    return sums


@gluon.jit
def _own_expert(
    numbers, token, choice, expert, experts, CHOSEN: gl.constexpr, TOKEN: gl.constexpr, PARTIAL: gl.constexpr
):
    """Return the expert of each warp, int64; 0 where it is elsewhere."""
    own = expert + choice * 0
    if TOKEN:
        own = gl.load(numbers + token * CHOSEN + choice, cache_modifier=".cg")
        if PARTIAL:
            own = gl.where(own < experts, own, 0)
    return own.to(gl.int64)


@gluon.jit
def _load_weight(w_from, s_from, part, s_part, begin, UNITS: gl.constexpr, C: gl.constexpr, EVEN: gl.constexpr):
    """Return words and exponents of C tiles of each warp; words are 0 behind the last one."""
    words = ()
    factors = ()
    for i in gl.static_range(C):
        if EVEN:
            words += (gl.load(w_from + (begin + i) * 128, eviction_policy="evict_first"),)  # type: ignore[assignment]
            factors += (gl.load(s_from + (begin + i) * 8),)  # type: ignore[assignment]
        else:
            there = part + (begin + i) < UNITS
            words += (  # type: ignore[assignment]
                gl.load(w_from + (begin + i) * 128, mask=there, other=0, eviction_policy="evict_first"),
            )
            s_there = s_part + (begin + i) < UNITS
            factors += (gl.load(s_from + (begin + i) * 8, mask=s_there, other=0),)  # type: ignore[assignment]
    return words, factors


@gluon.jit
def _load_x(x_from, x_mask, x_part, begin, UNITS: gl.constexpr, C: gl.constexpr, EVEN: gl.constexpr):
    """Return pairs of columns of C tiles of each warp, [W, M, 32] int32 each."""
    xs = ()
    for i in gl.static_range(C):
        mask = x_mask
        if not EVEN:
            mask = x_mask & (x_part + (begin + i) < UNITS)
        xs += (gl.load(x_from + (begin + i) * 32, mask=mask, other=0),)  # type: ignore[assignment]
    return xs


@gluon.jit
def _multiply(
    weight, xs, acc, C: gl.constexpr, W: gl.constexpr, R: gl.constexpr, M: gl.constexpr, flat: gl.constexpr,
    quads: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    words, factors = weight
    for i in gl.static_range(C):
        even, odd = gl.inline_asm_elementwise(
            _SPLIT, "=r,=r,r,r", [xs[i]], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=2
        )
        b = gl.reshape(gl.join(even, odd), [W, M, 16, 2, 2])  # two words, half, which word
        b = gl.reshape(gl.permute(b, (0, 1, 2, 4, 3)), [W, M, 2, 4, 2, 2, 2])  # warp, row, run, l, s, c, e
        b = gl.reshape(gl.permute(b, (0, 2, 4, 5, 3, 6, 1)), [W, 64, M])
        b = gl.convert_layout(b, gl.DotOperandLayout(1, mma, 2))
        four = gl.expand_dims(factors[i], 3) + gl.zeros([W, R, 32, 4], gl.int32, quads)
        exponents = gl.convert_layout(gl.reshape(four, [W, R, 128]), flat)
        a = expand(words[i], exponents, [W, R], [W, 16 * R, 64], gl.DotOperandLayout(0, mma, 2))
        acc = mma_v2(a, b, acc)
    return acc


@gluon.jit
def expand(words, exponents, TILES: gl.constexpr, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
    """Return 2^-63 times the values of words of TILES tiles, each of 128 words, in bf16 as SHAPE."""
    o = gl.inline_asm_elementwise(
        _EXPAND, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r",
        [words, exponents], dtype=(gl.bfloat16,) * 8, is_pure=True, pack=4,
    )  # fmt: skip
    W: gl.constexpr = TILES[0]
    R: gl.constexpr = TILES[1]
    first = gl.join(gl.join(o[0], o[1]), gl.join(o[2], o[3]))  # [..., h, c]
    second = gl.join(gl.join(o[4], o[5]), gl.join(o[6], o[7]))
    both = gl.join(first, second)  # words, h, c, s
    parts = gl.reshape(both, [W, R, 8, 4, 2, 2, 2, 2, 2])  # W, R, 8 rows, l, run, e, h, c, s
    parts = gl.permute(parts, (0, 1, 6, 2, 4, 8, 7, 3, 5))  # W R h 8 | run s c l e
    return gl.convert_layout(gl.reshape(parts, SHAPE), LAYOUT)


@gluon.jit
def write_gated(
    gate, up, added, slots, y, n_begin, m, pair, end,
    CHOSEN: gl.constexpr, KIND: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr, MADE: gl.constexpr,
    N: gl.constexpr, SORTED: gl.constexpr, ADAPTED: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Write y [pairs, MADE], the activation of gates and ups [N, m]; if SORTED, rows and columns are in the order of
    the pairs and of the tensor core."""
    n = n_begin + gl.arange(0, N, layout=gl.SliceLayout(1, LAYOUT))
    if ADAPTED:
        adapted = (n < MADE)[:, None] & (gl.load(slots + pair // CHOSEN, mask=m < end, other=0) > 0)[None, :]
        of_pairs = added + pair.to(gl.int64)[None, :] * (2 * MADE) + n[:, None]
        gate += gl.load(of_pairs, mask=adapted, other=0.0).to(gl.float32)
        up += gl.load(of_pairs + MADE, mask=adapted, other=0.0).to(gl.float32)
    if LIMIT > 0:
        if KIND != "silu":
            gate = gl.minimum(gate, LIMIT)
        up = gl.minimum(gl.maximum(up, -LIMIT), LIMIT)
    if KIND == "swigluoai":
        made = gate * (up + 1.0) / (1.0 + gl.exp2(gate * (-1.4426950408889634 * ALPHA)))
    elif KIND == "gelu":
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        made = gate * up / (1.0 + gl.exp2(inner * -1.4426950408889634))
    else:
        made = gate / (1.0 + gl.exp2(gate * -1.4426950408889634))
        if LIMIT > 0:
            made = gl.minimum(made, LIMIT)
        made *= up
    if SORTED:
        column = n // 32 * 32 + n % 8 // 2 * 8 + n % 32 // 8 * 2 + n % 2  # (l, s, c, e) is at (s, c, l, e)
        to = y + m.to(gl.int64)[None, :] * MADE + column[:, None]
        gl.store(to, made.to(y.dtype.element_ty), mask=(m < end)[None, :] & (n < MADE)[:, None])
    else:
        write_rows(made, y, n_begin, pair, m < end, MADE, N, LAYOUT)


@gluon.jit
def write_scaled(
    sums, factors, added, slots, y, n_begin, m, pair, end,
    CHOSEN: gl.constexpr, MADE: gl.constexpr, N: gl.constexpr, ADAPTED: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Write sums [N, m] times the factors of pairs to y [pairs, MADE]."""
    n = n_begin + gl.arange(0, N, layout=gl.SliceLayout(1, LAYOUT))
    if ADAPTED:
        adapted = (n < MADE)[:, None] & (gl.load(slots + pair // CHOSEN, mask=m < end, other=0) > 0)[None, :]
        of_pairs = added + pair.to(gl.int64)[None, :] * MADE + n[:, None]
        sums += gl.load(of_pairs, mask=adapted, other=0.0).to(gl.float32)
    write_rows(sums * factors[None, :], y, n_begin, pair, m < end, MADE, N, LAYOUT)


@gluon.jit
def write_rows(values, y, n_begin, row, there, MADE: gl.constexpr, N: gl.constexpr, LAYOUT: gl.constexpr):
    """Write values [N, rows] to those rows of y [rows, MADE]."""
    n = n_begin + gl.arange(0, N, layout=gl.SliceLayout(1, LAYOUT))
    to = y + row.to(gl.int64)[None, :] * MADE + n[:, None]
    gl.store(to, values.to(y.dtype.element_ty), mask=there[None, :] & (n < MADE)[:, None])
