"""Paged caches for the tests of attention kernels: what no row may read is NaN, and unused entries lead there."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quire.compute.kernels.reference.attention_inputs import PagedKV

NAN = float("nan")


class Paged(NamedTuple):
    """A cache, and a table [slots, n] that leads to it."""

    kv: PagedKV
    table: Tensor


def paged(
    lengths: list[int],
    block_size: int,
    kv_heads: int,
    d: int,
    dtype: torch.dtype,
    device: str,
    window: int | None = None,
    begins: list[int] | None = None,
) -> Paged:
    """Random contexts of so many tokens, a line of the table each, in blocks that lie anywhere.

    Block 1 is poison: tables name it, or a block that there is not, wherever nothing is seen. What is
    seen are the last `window` tokens, or those from `begins` on.
    """
    width = -(-max(lengths) // block_size) + 2
    blocks = 2 + sum(-(-length // block_size) for length in lengths)
    shape = (2, blocks, block_size, kv_heads, d)
    cache = torch.full(shape, NAN, dtype=dtype, device=device)
    free = (2 + torch.randperm(blocks - 2)).tolist()
    table = torch.ones((len(lengths), width), dtype=torch.int64)
    table[:, -1] = 2**40
    for slot, length in enumerate(lengths):
        seen_from = 0 if window is None else max(0, length - window)
        seen_from = seen_from if begins is None else begins[slot]
        for number in range(-(-length // block_size)):
            begin, end = max(seen_from, number * block_size), min(length, (number + 1) * block_size)
            if begin < end:
                block = free.pop()
                table[slot, number] = block
                offsets = slice(begin - number * block_size, end - number * block_size)
                cache[:, block, offsets] = torch.randn((2, end - begin, kv_heads, d)).to(dtype).to(device)
    return Paged(PagedKV(cache[0], cache[1]), table.to(device))


def slopes_of(heads: int, device: str) -> Tensor:
    """Slopes of ALiBi, from steep to almost flat."""
    return 0.7 ** torch.arange(1, heads + 1, device=device)


def sinks_of(heads: int, device: str) -> Tensor:
    """Sinks from far below to far above all scores."""
    return torch.linspace(-6, 6, heads, device=device) if heads > 1 else torch.full((1,), 1.5, device=device)


def assert_near(found: Tensor, expected: Tensor) -> None:
    """Sums of many products differ in their order; weights are rounded to the cache's dtype before they are used."""
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}[found.dtype]
    torch.testing.assert_close(found.float(), expected.float(), rtol=tolerance, atol=tolerance)
