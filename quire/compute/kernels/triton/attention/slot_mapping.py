"""Computes where a step's tokens go in the paged cache, in one launch, whose time counts more than the eight bytes a
token."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.compute.kernels.triton.launching.dependent_launch import can_overlap, release_dependents, wait_for_inputs
from quire.compute.kernels.triton.launching.launch import fast_launch

_BLOCK = 256
_WARPS = 4


def compute_slot_mapping(
    block_table: Tensor, slots: Tensor, positions: Tensor, block_size: int, slot_mapping: Tensor
) -> None:
    """Implement reference/paged_attention.py's `compute_slot_mapping`; all tensors but the block table are
    contiguous."""
    tokens = len(positions)
    if not tokens:
        return
    overlap = can_overlap(block_table.device)
    _compute_slot_mapping[(-(-tokens // _BLOCK),)](
        block_table, slots, positions, slot_mapping, tokens, block_table.stride(0),
        BLOCK_SIZE=block_size, BLOCK=_BLOCK, OVERLAP=overlap, num_warps=_WARPS, launch_pdl=overlap,
    )  # fmt: skip


@fast_launch
@triton.jit(
    do_not_specialize=["tokens", "block_table_stride"],
    do_not_specialize_on_alignment=["slots", "positions", "slot_mapping"],
)
def _compute_slot_mapping(
    block_table, slots, positions, slot_mapping, tokens, block_table_stride,
    BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    release_dependents(OVERLAP)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < tokens
    wait_for_inputs(OVERLAP)
    slot = tl.load(slots + token, inside, 0)
    position = tl.load(positions + token, inside, 0)
    block = tl.load(block_table + slot * block_table_stride + position // BLOCK_SIZE, inside, 0)
    tl.store(slot_mapping + token, block * BLOCK_SIZE + position % BLOCK_SIZE, inside)
