"""Copies a step's inputs from the host and its outputs to it, by kernels that access pinned memory directly.

A copy engine would do the same, but a device takes 4 to 6 µs to switch from kernels to a copy engine and as long to
switch back, at both ends of each step. A few KB travel with the latency of one read, some 2 µs. A recorded step is
always launched with the same addresses, and the host prepares one step while another is on its way: so there are
several buffers, and the device counts the steps. Programs share the entries of a step; each has a count of its own, so
that none reads what another has changed.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.compute.kernels.triton.launching.dependent_launch import can_overlap, release_dependents, wait_for_inputs
from quire.compute.kernels.triton.launching.launch import fast_launch

_BLOCK = 1_024
_WARPS = 4


def copy_inputs_from_host(buffers: Tensor, turn: Tensor, out: Tensor) -> None:
    """All are contiguous; `turn` has an entry for each program that shares the work."""
    number, capacity = buffers.shape
    overlap = can_overlap(out.device)
    _copy_inputs_from_host[(len(turn),)](
        buffers, turn, out, len(out), capacity,
        NUMBER=number, BLOCK=_BLOCK, OVERLAP=overlap, num_warps=_WARPS, launch_pdl=overlap,
    )  # fmt: skip


def copy_outputs_to_host(outputs: Tensor, buffers: Tensor, turn: Tensor) -> None:
    """All are contiguous."""
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
