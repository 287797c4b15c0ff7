"""Copies between a step and the host, by kernels that access pinned memory directly; and moves of KV blocks.

A copy engine would do the same, but a device takes 4 to 6 µs to switch from kernels to a copy engine and as long to
switch back, at both ends of each step. A few KB travel with the latency of one read, some 2 µs. A recorded step is
always launched with the same addresses, and the host prepares one step while another is on its way: so there are
several buffers, and the device counts the steps. Programs share the entries of a step; each has a count of its own, so
that none reads what another has changed.

A block of the KV cache has a contiguous piece in each storage, which holds a layer's keys or its values. One launch
moves blocks of all layers: a program moves a part of one piece, 64 bytes a thread."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.compute.kernels.triton.launching.dependent_launch import can_overlap, release_dependents, wait_for_inputs
from quire.compute.kernels.triton.launching.launch import cdiv, fast_launch, next_power_of_2

_BLOCK = 1_024
_WARPS = 4
_PART_BYTES = 8_192
"""Bytes of a block's piece that a program moves."""


def copy_inputs_from_host(buffers: Tensor, turn: Tensor, out: Tensor) -> None:
    """All are contiguous; `turn` has an entry for each program that shares the work."""
    number, capacity = buffers.shape
    overlap = can_overlap(out.device)
    _copy_inputs_from_host[(len(turn),)](
        buffers, turn, out, len(out), capacity,
        NUMBER=number, BLOCK=_BLOCK, OVERLAP=overlap, num_warps=_WARPS, launch_pdl=overlap,
    )  # fmt: skip


def copy_outputs_to_host(outputs: Tensor, buffers: Tensor, turn: Tensor) -> None:
    """Implement reference/host_transfer.py's `copy_outputs_to_host`; all tensors are contiguous."""
    number, entries = buffers.shape
    overlap = can_overlap(outputs.device)
    _copy_outputs_to_host[(1,)](
        outputs, buffers, turn, entries,
        NUMBER=number, BLOCK=_BLOCK, OVERLAP=overlap, num_warps=_WARPS, launch_pdl=overlap,
    )  # fmt: skip


@fast_launch
@triton.jit(do_not_specialize=["entries", "capacity"], do_not_specialize_on_alignment=["buffers", "turn", "out"])
def _copy_inputs_from_host(
    buffers, turn, out, entries, capacity,
    NUMBER: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    release_dependents(OVERLAP)
    program = tl.program_id(0)
    wait_for_inputs(OVERLAP)
    steps = tl.load(turn + program)
    own = buffers + steps % NUMBER * capacity
    for first in range(program * BLOCK, entries, tl.num_programs(0) * BLOCK):
        at = first + tl.arange(0, BLOCK)
        tl.store(out + at, tl.load(own + at, at < entries, 0, cache_modifier=".cv"), at < entries)
    tl.debug_barrier()  # all of this program have read its count
    tl.store(turn + program, steps + 1)


@fast_launch
@triton.jit(do_not_specialize=["entries"], do_not_specialize_on_alignment=["outputs", "buffers", "turn"])
def _copy_outputs_to_host(
    outputs, buffers, turn, entries,
    NUMBER: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    release_dependents(OVERLAP)
    wait_for_inputs(OVERLAP)
    own = buffers + (tl.load(turn) - 1) % NUMBER * entries
    for first in range(0, entries, BLOCK):
        at = first + tl.arange(0, BLOCK)
        tl.store(own + at, tl.load(outputs + at, at < entries, 0), at < entries)


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
