"""Where a step's tokens go in the KV cache, by our own kernel."""

from __future__ import annotations

from torch import Tensor

from quire.compute.kernels.cpu.library import library
from quire.compute.kernels.reference import paged_attention as reference


def compute_slot_mapping(
    block_table: Tensor, slots: Tensor, positions: Tensor, block_size: int, slot_mapping: Tensor
) -> None:
    """Arguments as in reference/paged_attention.py."""
    kernels = library()
    whole = all(tensor.is_contiguous() for tensor in (block_table, slots, positions, slot_mapping))
    if kernels is None or not whole:
        reference.compute_slot_mapping(block_table, slots, positions, block_size, slot_mapping)
        return
    kernels(
        "compute_slot_mapping",
        None,
        block_table.data_ptr(),
        block_table.stride(0),
        slots.data_ptr(),
        positions.data_ptr(),
        len(positions),
        block_size,
        slot_mapping.data_ptr(),
    )
