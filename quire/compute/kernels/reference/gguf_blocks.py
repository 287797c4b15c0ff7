"""Weights in the blocks of a GGUF file: the meaning of their bits, and products with them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from quire.compute.gguf.tensor_types import NONLINEAR, QUANTIZED
from quire.compute.kernels.reference.activation import silu_and_mul

_HALF = 2
"""Bytes of fp16."""


class Unpacked(NamedTuple):
    """A weight [rows, columns] in parts: d · s · (value(code) - zero) - dmin · m (see QuantizedType).

    Attributes:
        codes: [rows, columns] uint8 below 2^bits, or int8 where the type has 8 bits.
        d, dmin: [rows, blocks] fp16; dmin None: there is no minimum.
        s, m: [rows, groups] int8; None: all are 1.
    """

    codes: Tensor
    d: Tensor
    dmin: Tensor | None
    s: Tensor | None
    m: Tensor | None


class BlockWeight(NamedTuple):
    """A weight [rows, columns].

    Attributes:
        data: [rows, bytes of a row] uint8, as in the file; with three dimensions, as a device's `pack_blocks` made it.
        name: The name of its type.
        rows, columns: Its shape.
    """

    data: Tensor
    name: str
    rows: int
    columns: int

    @property
    def is_packed(self) -> bool:
        """Whether the data are in the layout of a device's kernels."""
        return self.data.dim() == 3


def dequantize(blocks: Tensor, name: str) -> Tensor:
    """Dequantize [rows, bytes of a row] uint8 of this type → [rows, columns] fp32."""
    form = QUANTIZED[name]
    parts = unpack(blocks, name)
    rows, columns = parts.codes.shape
    values = parts.codes.float()
    if form.nonlinear:
        values = torch.tensor(NONLINEAR, dtype=torch.float32)[parts.codes.long()]
    values = (values - form.zero).view(rows, -1, form.group)
    in_block = form.block // form.group
    scale = parts.d.float().repeat_interleave(in_block, 1)  # [rows, groups]
    scale = scale if parts.s is None else scale * parts.s.float()
    values = scale.unsqueeze(-1) * values
    if parts.dmin is not None:
        minimum = parts.dmin.float().repeat_interleave(in_block, 1)
        minimum = minimum if parts.m is None else minimum * parts.m.float()
        values = values - minimum.unsqueeze(-1)
    return values.view(rows, columns)


def unpack(blocks: Tensor, name: str) -> Unpacked:
    """Take a weight of this type apart; blocks as in `dequantize`."""
    form = QUANTIZED[name]
    rows = len(blocks)
    flat = blocks.reshape(-1, form.block_bytes)
    codes, d, dmin, s, m = _READERS[name](flat)

    def by_row(part: Tensor | None) -> Tensor | None:
        return None if part is None else part.reshape(rows, -1)

    whole, scale = by_row(codes), by_row(d)
    assert whole is not None and scale is not None
    return Unpacked(whole, scale, by_row(dmin), by_row(s), by_row(m))


def pack_blocks(blocks: Tensor, name: str) -> Tensor:
    """Return the data of a BlockWeight; blocks as in `dequantize`."""
    return blocks


def block_linear(x: Tensor, weight: BlockWeight, bias: Tensor | None, y: Tensor) -> None:
    """Write x Wᵀ + bias in x's dtype to y: x [tokens, columns], bias [rows], y [tokens, rows]."""
    product = (x.float() @ dequantize(weight.data, weight.name).T).to(x.dtype)
    y.copy_(product if bias is None else product + bias)


def block_linear_silu_and_mul(x: Tensor, weight: BlockWeight, bias: Tensor | None, out: Tensor) -> None:
    """Write silu of the first half of the outputs of `block_linear` times the second half to out [tokens, rows / 2]."""
    y = x.new_empty((len(x), weight.rows))
    block_linear(x, weight, bias, y)
    silu_and_mul(y, out)


def block_embed(tokens: Tensor, weight: BlockWeight, scale: float | None, out: Tensor) -> None:
    """Write rows of the weight times `scale`, in out's dtype, to out: tokens [n] int64 → out [n, columns]."""
    rows = dequantize(weight.data[tokens], weight.name).to(out.dtype)
    out.copy_(rows if scale is None else rows * scale)


_Parts = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]
"""The parts of blocks [n, bytes]: codes [n, block], d and dmin [n, 1], s and m [n, groups of a block]."""


def _half(flat: Tensor, at: int) -> Tensor:
    return flat[:, at : at + _HALF].contiguous().view(torch.float16)


def _nibbles(packed: Tensor, run: int) -> Tensor:
    """Return [n, 2 · bytes], of each `run` of bytes first all low halves, then all high halves."""
    runs = packed.reshape(len(packed), -1, run)
    return torch.stack((runs & 15, runs >> 4), 2).flatten(1)


def _bits(packed: Tensor, width: int) -> Tensor:
    """Return [n, 8 / width, bytes], of every byte the lowest `width` bits, then the next."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8).view(1, -1, 1)
    return packed.unsqueeze(1) >> shifts & (1 << width) - 1


def _fifth_bits(flat: Tensor, at: int) -> Tensor:
    """Return [n, 32], the bits of 4 bytes from the lowest on, at the place of the fifth bits of codes."""
    return (_bits(flat[:, at : at + 4], 1).transpose(1, 2).flatten(1) << 4).to(torch.uint8)


def _signed(codes: Tensor, zero: int) -> Tensor:
    return codes.to(torch.int8) - zero


def _without_groups(flat: Tensor, at: int, fifth_bits: int | None = None, minimum: bool = False) -> _Parts:
    """Read blocks of one group, with codes at byte `at`, and a minimum behind d or none."""
    codes = _nibbles(flat[:, at:], 16)
    if fifth_bits is not None:
        codes |= _fifth_bits(flat, fifth_bits)
    return codes, _half(flat, 0), -_half(flat, 2) if minimum else None, None, None


def _q8_0(flat: Tensor) -> _Parts:
    return flat[:, 2:].contiguous().view(torch.int8), _half(flat, 0), None, None, None


def _q2_k(flat: Tensor) -> _Parts:
    scales = flat[:, :16]
    halves = _bits(flat[:, 16:80].reshape(-1, 32), 2)  # [2n, 4, 32]
    codes = halves.reshape(len(flat), -1)
    return codes, _half(flat, 80), _half(flat, 82), _signed(scales & 15, 0), _signed(scales >> 4, 0)


def _q3_k(flat: Tensor) -> _Parts:
    low = _bits(flat[:, 32:96].reshape(-1, 32), 2).reshape(len(flat), 8, 32)
    codes = low | _bits(flat[:, :32], 1) << 2  # a set bit spares the 4 that are taken off
    scales = flat[:, 96:108]
    four = torch.cat((scales[:, :8] & 15, scales[:, :8] >> 4), 1)
    two = _bits(scales[:, 8:], 2).reshape(-1, 16)
    return codes.flatten(1), _half(flat, 108), None, _signed(four | two << 4, 32), None


def _scales_and_minima(packed: Tensor) -> tuple[Tensor, Tensor]:
    """12 bytes → 8 scales and 8 minima of 6 bits each (Q4_K, Q5_K)."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), 1)
    minima = torch.cat((second & 63, third >> 4 | second >> 6 << 4), 1)
    return _signed(scales, 0), _signed(minima, 0)


def _q4_k(flat: Tensor) -> _Parts:
    scales, minima = _scales_and_minima(flat[:, 4:16])
    return _nibbles(flat[:, 16:], 32), _half(flat, 0), _half(flat, 2), scales, minima


def _q5_k(flat: Tensor) -> _Parts:
    scales, minima = _scales_and_minima(flat[:, 4:16])
    fifth = _bits(flat[:, 16:48], 1).reshape(len(flat), -1) << 4
    codes = _nibbles(flat[:, 48:], 32) | fifth
    return codes, _half(flat, 0), _half(flat, 2), scales, minima


def _q6_k(flat: Tensor) -> _Parts:
    low = flat[:, :128].reshape(-1, 64)
    low = torch.cat((low & 15, low >> 4), 1)  # [2n, 128]
    high = _bits(flat[:, 128:192].reshape(-1, 32), 2).reshape(-1, 128)
    codes = (low | high << 4).reshape(len(flat), -1)
    return codes, _half(flat, 208), None, flat[:, 192:208].contiguous().view(torch.int8), None


def _iq4_xs(flat: Tensor) -> _Parts:
    high = _bits(flat[:, 2:4], 2).transpose(1, 2).reshape(len(flat), -1)  # [n, 8]
    low = _bits(flat[:, 4:8], 4).transpose(1, 2).reshape(len(flat), -1)
    return _nibbles(flat[:, 8:], 16), _half(flat, 0), None, _signed(low | high << 4, 32), None


_READERS: dict[str, Callable[[Tensor], _Parts]] = {
    "Q4_0": partial(_without_groups, at=2),
    "Q4_1": partial(_without_groups, at=4, minimum=True),
    "Q5_0": partial(_without_groups, at=6, fifth_bits=2),
    "Q5_1": partial(_without_groups, at=8, fifth_bits=4, minimum=True),
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": partial(_without_groups, at=2),
    "IQ4_XS": _iq4_xs,
}
