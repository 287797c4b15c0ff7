"""How recurrent ops divide a state among programs, and rows into those that go token by token and those in chunks."""

from __future__ import annotations

import torch
import triton

CHUNK = 32
"""Tokens of a chunk."""
FEW = 8
"""Tokens of the longest row that goes through token by token, in a step in which rows have more than one."""
ALL = 1 << 30
"""In place of FEW, where all rows go through token by token."""
_ELEMENTS = 4096
"""How much of a state a program has in registers."""
_COLUMNS = 64
"""Columns of a state that a program takes through chunks."""


def columns_of_tokens(columns: int, width: int) -> int:
    """Return how many of a state's columns, each of so many elements, a program takes through single tokens."""
    found: int = min(triton.next_power_of_2(columns), max(1, _ELEMENTS // width))
    return found


def columns_of_chunks(columns: int) -> int:
    """Return how many of a state's columns a program takes through chunks."""
    found: int = max(16, min(triton.next_power_of_2(columns), _COLUMNS))
    return found


def precision_of(dtype: torch.dtype) -> str:
    """Return the precision of the products of chunks, as high as what is stored in this dtype shows."""
    return "tf32x3" if dtype == torch.float32 else "tf32"
