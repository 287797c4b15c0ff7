"""Moves whole blocks of the KV cache, of all layers, by one launch.

A block has a contiguous piece in each storage, which holds a layer's keys or its values. A program moves a part of one
piece, 64 bytes a thread, so each byte is read once and written once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.compute.kernels.triton.launching.dependent_launch import can_overlap, release_dependents, wait_for_inputs
from quire.compute.kernels.triton.launching.launch import cdiv, fast_launch, next_power_of_2

_PART_BYTES = 8_192
_WARPS = 4


def move_blocks(source: Tensor, origins: Tensor | None, target: Tensor, goals: Tensor | None) -> None:
    numbers = goals if origins is None else origins
    assert numbers is not None and source[0, 0].is_contiguous() and target[0, 0].is_contiguous()
    if not len(numbers):
        return
    storages, size, overlap = source.shape[1], source[0, 0].numel(), can_overlap(source.device)
    part = min(_PART_BYTES // source.element_size(), next_power_of_2(size))
    parts = cdiv(size, part)
    _move[(len(numbers) * storages * parts,)](
        source, origins, source.stride(0), source.stride(1), target, goals, target.stride(0), target.stride(1),
        STORAGES=storages, SIZE=size, PARTS=parts, PART=part, OVERLAP=overlap, num_warps=_WARPS, launch_pdl=overlap,
    )  # fmt: skip


@fast_launch
@triton.jit(do_not_specialize_on_alignment=["origins", "goals"])
def _move(
    source, origins, source_block, source_storage, target, goals, target_block, target_storage,
    STORAGES: tl.constexpr, SIZE: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (n · STORAGES + s) · PARTS + p moves part p of the n-th block's piece in storage s."""
    release_dependents(OVERLAP)
    piece, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    number, storage = (piece // STORAGES).to(tl.int64), (piece % STORAGES).to(tl.int64)
    place = part * PART + tl.arange(0, PART)
    wait_for_inputs(OVERLAP)
    origin = number
    if origins is not None:
        origin = tl.load(origins + number)
    goal = number
    if goals is not None:
        goal = tl.load(goals + number)
    values = tl.load(source + origin * source_block + storage * source_storage + place, place < SIZE)
    tl.store(target + goal * target_block + storage * target_storage + place, values, place < SIZE)
