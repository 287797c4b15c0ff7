"""Compiles attention of many rows of one token for sm_90, on a machine without a card.

    python -m tests.kernels.triton.attention.compile_decode_large_batch

Prints a line for each shape, with how many kernels Triton made for steps of all sizes; fails where one does not
compile, spills registers, copies in other steps than 16 bytes, or where a multiprocessor does not take as many of its
programs as it should.
"""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.runtime.jit import JITFunction

from quire.compute.kernels.reference.attention_inputs import PagedKV, Scores
from quire.compute.kernels.reference.paged_attention import KV_SPLIT_COLUMNS, new_decode_partials
from quire.compute.kernels.triton.attention import decode_large_batch
from quire.compute.kernels.triton.attention.decode_large_batch import MANY_ROWS
from tests.kernels.triton.attention.fits import KEPT, MEMORY, REGISTERS
from tests.kernels.triton.compile_cases import NoCard
from tests.kernels.triton.not_interpreted import taken

SHAPES = (
    (32, 8, 128, 16), (4, 1, 128, 8), (16, 1, 128, 32), (14, 2, 64, 16), (4, 1, 64, 16), (64, 4, 64, 32),
    (8, 4, 256, 16),
)  # fmt: skip
"""Query heads, KV heads, their width, block size."""
NARROW = (
    (32, 8, 128, 16, torch.float8_e4m3fn), (14, 2, 64, 16, torch.float8_e5m2), (16, 1, 128, 32, torch.int8),
)  # fmt: skip
"""The same with caches of 8-bit elements."""
STEPS = ((MANY_ROWS, 20, 66), (MANY_ROWS + 1, 32, 132), (1024, 501, 1056))
"""Rows, blocks of a context at most, room for splits."""
SPILLED = 64
"""Bytes of a thread that the widest heads and 8-bit elements may lack: they leave no register free, and Tritons differ
by a few."""


def main() -> None:
    triton.runtime.driver.set_active(NoCard())
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=132)  # type: ignore
    decode_large_batch.can_overlap = lambda device: True  # type: ignore[assignment]
    decode_large_batch.is_sm_90 = lambda device: True  # type: ignore[assignment]
    made: list[Any] = []
    JITFunction.__getitem__ = lambda self, grid: (  # type: ignore[method-assign]
        lambda *args, **kwargs: made.append(self.warmup(*args, grid=grid, **kwargs))
    )
    for number, (*shape, cache) in enumerate((*((*shape, None) for shape in SHAPES), *NARROW)):
        d = shape[2]
        made.clear()
        dtype, cap = torch.bfloat16 if number % 2 else torch.float16, 30.0 if number % 3 else None
        for step in STEPS:
            _launch(*shape, *step, dtype, cache or dtype, cap)
        kernel = made[0]
        copies = re.findall(r"cp\.async\.c[ag]\.shared\.global[^;]*\], (\w+)", kernel.asm["ptx"])
        assert set(copies) == {"0x10"}, set(copies)
        assert "mma.sync.aligned.m16n8k16" in kernel.asm["ptx"]
        assert taken(kernel, "STACK") <= (SPILLED if d == 256 or cache is not None else 0)
        programs = decode_large_batch._PROGRAMS if cache is None else decode_large_batch._PROGRAMS_8_BIT
        assert programs * (kernel.metadata.shared + KEPT) <= MEMORY[90] + KEPT
        assert programs * taken(kernel, "REG") * 32 <= REGISTERS
        print(*shape, cache, len({id(kernel) for kernel in made}))


def _launch(
    heads: int,
    kv_heads: int,
    d: int,
    block_size: int,
    rows: int,
    blocks: int,
    room: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    cap: float | None,
) -> None:
    with torch.device("meta"):
        q, cache = torch.empty(rows, heads, d, dtype=dtype), torch.empty(9, block_size, kv_heads, d, dtype=cache_dtype)
        scales = None if cache_dtype == dtype else torch.empty(2, kv_heads)
        table = torch.empty(rows, blocks, dtype=torch.int64)
        splits = torch.empty(room, KV_SPLIT_COLUMNS, dtype=torch.int32)
        partials = new_decode_partials(room, heads, kv_heads, d, q.device)
    assert decode_large_batch.serves_large_batch(q, cache, rows)
    kv, out = PagedKV(cache, cache, scales), torch.empty_like(q)
    decode_large_batch.decode_attention_large_batch(q, kv, table, splits, partials, Scores(0.1, cap), out)


if __name__ == "__main__":
    main()
