"""Products with weights in the blocks of a GGUF file, computed in integers; without our kernels by the reference.

A weight is packed in panels of PANEL outputs, and a panel block by block: d and dmin of all its outputs, fp16; s and m,
int8, group by group; then codes, group by group. 8-bit codes lie in pairs of columns, output beside output. 4-bit codes
lie in words of 8 columns: columns 0, 2, 4 and 6 take the low half, from its lowest bits on, and the others the high
half, so that a shift gives 16-bit pairs of neighbours. The low 4 bits of 5-bit and 6-bit codes lie in the same way. A
word for each output follows, which has the other bits of all columns of the group: of even columns in its low half, of
odd columns in its high half. native/block_forms.h reads this layout.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from quire.compute.gguf.tensor_types import PANEL, QUANTIZED, TYPES, QuantizedType
from quire.compute.kernels.cpu.activation import silu_and_mul
from quire.compute.kernels.cpu.library import library, library_for_indices
from quire.compute.kernels.reference import gguf_blocks as reference
from quire.compute.kernels.reference.gguf_blocks import BlockWeight, unpack

_NUMBERS = {form.name: number for number, form in TYPES.items()}
_OWN_NUMBERS = {"W4": 256, "W8": 257, "F8": 258, "I8": 259, "M4": 260, "I16": 261}
"""Numbers of the types of grouped_linear.py, scaled_linear.py, codebook_linear.py and linear.py, which no file has."""
OWN_PANELS = {"F8": 64, "I8": 32, "I16": 64}
"""Outputs of a panel, for types whose panels differ from PANEL."""
CODES_AT_ONCE = 1 << 21
"""Codes that are packed at a time, so that they stay in the processor's cache."""
_LOW, _HIGH = [0, 4, 1, 5], [2, 6, 3, 7]
"""Which of a word's 8 columns lie in the low halves of its bytes, and which in the high halves."""


def pack_blocks(blocks: Tensor, name: str) -> Tensor:
    """Pack blocks of type `name`: [rows, bytes of a row] uint8 → [panels, blocks, bytes] uint8.

    The last panel is filled with zeros. Without our kernels the blocks are returned unchanged.
    """
    form = QUANTIZED[name]
    if library() is None:
        return blocks
    rows, count = len(blocks), blocks.shape[1] // form.block_bytes
    packed = torch.empty((-(-rows // PANEL), count, form.packed_block_bytes()), dtype=torch.uint8)
    each = max(1, CODES_AT_ONCE // (PANEL * count * form.block))
    for first in range(0, len(packed), each):
        part = blocks[first * PANEL : (first + each) * PANEL]
        missing = -len(part) % PANEL
        if missing:
            part = torch.cat((part, part.new_zeros((missing, part.shape[1]))))
        _pack(part, form, packed[first : first + each])
    return packed


def block_linear(x: Tensor, weight: BlockWeight, bias: Tensor | None, y: Tensor) -> None:
    """Rows of x are rounded, as native/blocks.cpp says."""
    if weight.is_packed:
        _multiply("block_linear", x, weight, bias, y)
    else:
        reference.block_linear(x, weight, bias, y)


def block_linear_silu_and_mul(x: Tensor, weight: BlockWeight, bias: Tensor | None, out: Tensor) -> None:
    panel = OWN_PANELS.get(weight.name.partition("/")[0], PANEL)
    if not weight.is_packed:
        reference.block_linear_silu_and_mul(x, weight, bias, out)
    elif weight.rows % (2 * panel) == 0:
        _multiply("block_linear_silu_and_mul", x, weight, bias, out)
    else:
        y = torch.empty((x.shape[0], weight.rows), dtype=x.dtype)
        _multiply("block_linear", x, weight, bias, y)
        silu_and_mul(y, out)


def block_embed(tokens: Tensor, weight: BlockWeight, scale: float | None, out: Tensor) -> None:
    if not weight.is_packed:
        reference.block_embed(tokens, weight, scale, out)
        return
    kernels, factor = library_for_indices(tokens, out), 1.0 if scale is None else scale
    assert kernels is not None
    number = _number(weight.name)
    kernels("block_embed", out.dtype, tokens, len(tokens), weight.data, weight.columns, number, factor, out)


@functools.cache
def _number(name: str) -> int:
    """Return the number by which the kernels know a type; for one that no file has, it includes the block's columns."""
    if name in _NUMBERS:
        return _NUMBERS[name]
    own, block = name.split("/")
    return int(block) << 16 | _OWN_NUMBERS[own]


def _multiply(name: str, x: Tensor, weight: BlockWeight, bias: Tensor | None, y: Tensor) -> None:
    kernels = library()
    if x.stride(1) != 1:
        x = x.contiguous()
    assert kernels is not None and x.shape[1] == weight.columns and y.stride(1) == 1
    if not kernels.serves(x, bias, y):  # there are no kernels for fp16
        exact = torch.empty(y.shape, dtype=torch.float32)
        _multiply(name, x.float(), weight, None if bias is None else bias.float(), exact)
        y.copy_(exact)
        return
    shape = (weight.rows, weight.columns, _number(weight.name))
    kernels(name, x.dtype, x, x.stride(0), x.shape[0], weight.data, *shape, bias, y, y.stride(0))


def _pack(blocks: Tensor, form: QuantizedType, to: Tensor) -> None:
    """Pack the blocks of whole panels into `to` [panels, blocks, bytes]."""
    parts = unpack(blocks, form.name)
    panels, count, _ = to.shape
    groups = form.block // form.group
    pieces = []
    for half in (parts.d, parts.dmin):
        if half is not None:
            pieces.append(half.view(panels, PANEL, count).transpose(1, 2).contiguous().view(torch.uint8))
    for whole in (parts.s, parts.m):
        if whole is not None:
            by_group = whole.view(panels, PANEL, count, groups).permute(0, 2, 3, 1)  # [panels, blocks, groups, PANEL]
            pieces.append(by_group.reshape(panels, count, -1).view(torch.uint8))
    codes = parts.codes.view(torch.uint8).view(panels, PANEL, count * groups, form.group)
    by_group = pairs(codes) if form.bits == 8 else torch.cat((words(codes & 15), *_high_bits(codes, form.bits)), 2)
    pieces.append(by_group.reshape(panels, count, -1))
    torch.cat(pieces, 2, out=to)


def pairs(codes: Tensor) -> Tensor:
    """Order 8-bit codes as pairs of columns, output beside output.

    [panels, PANEL, groups, group] uint8 → [panels, groups, bytes] uint8.
    """
    panels, _, groups, group = codes.shape
    return codes.view(panels, PANEL, groups, group // 2, 2).permute(0, 2, 3, 1, 4).reshape(panels, groups, -1)


def words(codes: Tensor) -> Tensor:
    """Pack 4-bit codes into 32-bit words of 8 columns, output beside output.

    [panels, PANEL, groups, group] uint8 → [panels, groups, bytes] uint8.
    """
    panels, _, groups, group = codes.shape
    words = codes.view(panels, PANEL, groups, group // 8, 8)
    packed = words[..., _LOW] | words[..., _HIGH] << 4  # [panels, PANEL, groups, words, 4]
    return packed.permute(0, 2, 3, 1, 4).reshape(panels, groups, -1)


def _high_bits(codes: Tensor, bits: int) -> tuple[Tensor, ...]:
    """Pack the bits above the lowest 4 of 5-bit or 6-bit codes into one 32-bit word for each output and group.

    [panels, PANEL, groups, group] uint8 → one tensor [panels, groups, bytes] uint8, or none where `bits` is 4.
    """
    if bits == 4:
        return ()
    panels, _, groups, group = codes.shape
    pairs = (codes >> 4).to(torch.int32).view(panels, PANEL, groups, group // 2, 2)
    places = torch.arange(group // 2, dtype=torch.int32).view(-1, 1) * (bits - 4)
    halves = (pairs << places).sum(3).to(torch.uint16)  # [panels, PANEL, groups, 2]
    return (halves.view(torch.uint8).permute(0, 2, 1, 3).reshape(panels, groups, -1),)
