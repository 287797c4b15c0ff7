"""Attention fits the cards that it is promised for."""

from __future__ import annotations

import pytest
import torch

from quire.compute.kernels.triton.attention.prefill import shape_within
from tests.kernels.triton.attention.fits import MEMORY
from tests.kernels.triton.not_interpreted import printed_by

CASES = ("86:256:bfloat16", "86:128:bfloat16", "86:256:float32", "90:256:bfloat16", "90:128:bfloat16")
"""Cards with least shared memory, and those that tiles are tuned for; heads that need most of it."""


@pytest.mark.long("engine")
@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a card, every test launches what it runs")
def test_programs_find_shared_memory_and_registers() -> None:
    assert printed_by("tests.kernels.triton.attention.fits", *CASES).count("_prefill_attention_split_kv") == len(CASES)


@pytest.mark.parametrize(("d", "item"), [(64, 2), (128, 2), (256, 2), (64, 4), (256, 4)])
def test_less_memory_never_means_more_work_at_once(d: int, item: int) -> None:
    shapes = [shape_within(memory, d, item) for memory in sorted(MEMORY.values())]
    assert [shape.rows for shape in shapes] == sorted(shape.rows for shape in shapes)
    assert [shape.at_once for shape in shapes] == sorted(shape.at_once for shape in shapes)
    assert all(shape.rows >= 16 for shape in shapes)  # up to 16 query heads share a KV head
