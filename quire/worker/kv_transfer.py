"""Moving whole KV blocks: copies on the device, and swaps with a pool on the host.

Knows nothing about whose blocks they are.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from quire.kernels.dispatch import kernel
from quire.messages import Plan
from quire.worker.staging_buffer import Column, copied

STAGED_BYTES = 32 * 2**20
"""Of each of the two buffers on the device through which blocks are swapped."""
POOL_PART_BYTES = 256 * 2**20
"""Pinned memory takes long to make: the host's pool grows by parts of this size as it is first used."""

_log = logging.getLogger(__name__)


class BlockTransfer(Protocol):
    """Applies a plan's swaps and copies: out, then copies, then in. No target is also a source."""

    def columns(self, plan: Plan) -> tuple[Column, ...]:
        """What `apply` wants to find on the device."""
        ...

    def apply(self, plan: Plan, columns: Sequence[Tensor]) -> None:
        """Move blocks, in the order of the step's stream."""
        ...


class CpuBlockTransfer:
    """On a CPU, where both pools are main memory.

    Args:
        blocks: [storages, blocks, …].
        host: [storages, host blocks, …].
    """

    def __init__(self, blocks: Tensor, host: Tensor) -> None:
        self._blocks = blocks
        self._host = host

    def columns(self, plan: Plan) -> tuple[Column, ...]:
        """See BlockTransfer."""
        return ()

    def apply(self, plan: Plan, columns: Sequence[Tensor]) -> None:
        """See BlockTransfer."""
        if plan.swap_out:
            _move(self._blocks, self._host, plan.swap_out)
        if plan.copies:
            _move(self._blocks, self._blocks, plan.copies)
        if plan.swap_in:
            _move(self._host, self._blocks, plan.swap_in)


def _move(sources: Tensor, targets: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy blocks, (from, to)."""
    origin, goal = torch.tensor(pairs).unbind(1)
    for source, target in zip(sources, targets, strict=True):
        target.index_copy_(0, goal, source.index_select(0, origin))


class GpuBlockTransfer:
    """On a GPU: swaps go through pinned memory on a stream of their own, beside the steps'.

    A block that is swapped out is gathered into a staging buffer within the step's stream, so that it may be written
    again at once, and travels from there while the step computes. One that is swapped in travels to the other buffer,
    and the step waits for it.

    Args:
        blocks: [storages, blocks, …] on the device.
        host_blocks: Of the host's pool.
    """

    def __init__(self, blocks: Tensor, host_blocks: int) -> None:
        self._blocks = blocks.flatten(2).transpose(0, 1)  # [blocks, storages, elements]
        shape = self._blocks.shape[1:]
        block_bytes = shape.numel() * blocks.element_size()
        staged = max(1, min(STAGED_BYTES // block_bytes, host_blocks)) if host_blocks else 0
        self._outgoing, self._incoming = (
            torch.empty((staged, *shape), dtype=blocks.dtype, device=blocks.device) for _ in range(2)
        )
        self._move_blocks = kernel("move_blocks", blocks.device.type)
        self._pool = _PinnedPool(shape, blocks.dtype, max(1, POOL_PART_BYTES // block_bytes))
        self._stream = torch.cuda.Stream(blocks.device)  # type: ignore[no-untyped-call]
        self._left = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._rehearse()

    def _rehearse(self) -> None:
        """Move the dummy in every way, so that no kernel is compiled in the middle of serving."""
        dummy = torch.zeros(1, dtype=torch.int64, device=self._blocks.device)
        self._move_blocks(self._blocks, dummy, self._blocks, dummy)
        if len(self._outgoing):
            self._move_blocks(self._blocks, dummy, self._outgoing, None)
            self._move_blocks(self._outgoing, None, self._blocks, dummy)

    def columns(self, plan: Plan) -> tuple[Column, ...]:
        """See BlockTransfer."""
        columns: list[Column] = []
        for pairs in (plan.swap_out, plan.copies, [pair[::-1] for pair in plan.swap_in]):
            if pairs:
                columns.extend(np.array(pairs, dtype=np.int64).T.copy())  # the device's blocks of swaps come first
        return tuple(columns)

    def apply(self, plan: Plan, columns: Sequence[Tensor]) -> None:
        """See BlockTransfer. Many programs read each number."""
        left = list(columns)
        if plan.swap_out:
            self._swap_out(copied(left.pop(0)), [host for _, host in plan.swap_out])
            left.pop(0)
        if plan.copies:
            origin, goal = copied(left.pop(0)), copied(left.pop(0))
            self._move_blocks(self._blocks, origin, self._blocks, goal)
        if plan.swap_in:
            self._swap_in(copied(left.pop(0)), [host for host, _ in plan.swap_in])

    def _swap_out(self, blocks: Tensor, hosts: Sequence[int]) -> None:
        compute, size = torch.cuda.current_stream(), len(self._outgoing)
        for first in range(0, len(hosts), size):
            some = hosts[first : first + size]
            compute.wait_event(self._left)  # what was staged before has left
            self._move_blocks(self._blocks, blocks[first : first + size], self._outgoing, None)
            self._stream.wait_stream(compute)
            with torch.cuda.stream(self._stream):
                for place, host in enumerate(some):
                    self._pool[host].copy_(self._outgoing[place], non_blocking=True)
                self._left.record(self._stream)

    def _swap_in(self, blocks: Tensor, hosts: Sequence[int]) -> None:
        compute, size = torch.cuda.current_stream(), len(self._incoming)
        for first in range(0, len(hosts), size):
            some = hosts[first : first + size]
            self._stream.wait_stream(compute)  # what arrived before is in its place
            with torch.cuda.stream(self._stream):
                for place, host in enumerate(some):
                    self._incoming[place].copy_(self._pool[host], non_blocking=True)
                self._arrived.record(self._stream)
            compute.wait_event(self._arrived)
            self._move_blocks(self._incoming, None, self._blocks, blocks[first : first + size])


class _PinnedPool:
    """Blocks in pinned memory, by number; parts of it are made when they are first used.

    Where the system gives no more pinned memory, in the middle of serving, the part is made of ordinary memory: its
    copies wait for the device, but no request is lost.
    """

    def __init__(self, shape: torch.Size, dtype: torch.dtype, part: int) -> None:
        self._shape = shape
        self._dtype = dtype
        self._part = part
        self._pin = True
        self._parts: dict[int, Tensor] = {}

    def __getitem__(self, block: int) -> Tensor:
        number, place = divmod(block, self._part)
        if number not in self._parts:
            self._parts[number] = self._make()
        return self._parts[number][place]

    def _make(self) -> Tensor:
        shape = (self._part, *self._shape)
        if self._pin:
            try:
                return torch.empty(shape, dtype=self._dtype, pin_memory=True)
            except RuntimeError as error:
                self._pin = False
                _log.warning("swap        no more memory could be pinned, so swapping is slower: %s", error)
        return torch.empty(shape, dtype=self._dtype)
