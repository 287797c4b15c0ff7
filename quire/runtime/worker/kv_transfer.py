"""KV transfer: copies whole blocks on the device, and swaps them with a pool of host memory.

This module does not know which sequences own the blocks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.compute.kernels.dispatch import kernel
from quire.foundation.messages.workers import Plan
from quire.runtime.worker.host_memory import pin_host_memory, unpin_host_memory, upload
from quire.runtime.worker.pinned_host_pool import PinnedHostPool
from quire.runtime.worker.staging_buffer import ZeroCopyColumns, to_device_memory

STAGING_BYTES = 32 * 2**20
"""Size of each of the two buffers on the device through which blocks are swapped."""
MEASURED_BYTES = 16 * 2**20
"""Bytes that are loaded at the start to see how long that takes."""
_LOADED_AT_ONCE = 64
"""Blocks that a CPU moves at a time beside steps: few, so that it needs little memory for them."""
_MEASUREMENTS = 5
"""So often that is measured: the quickest time is the one that nothing else has disturbed."""


@dataclass(frozen=True)
class BlockMoves:
    """The device blocks that a plan moves, as [n] int64 device tensors. A field is None where nothing is moved that
    way.

    Attributes:
        swap_out: Blocks that are copied to the host.
        copy_sources, copy_targets: Blocks that are copied within the device, and their destinations.
        swap_in: Blocks that are filled from the host.
    """

    swap_out: Tensor | None = None
    copy_sources: Tensor | None = None
    copy_targets: Tensor | None = None
    swap_in: Tensor | None = None


NO_MOVES = BlockMoves()


class BlockTransfer:
    """Makes a plan's swaps and copies: first swaps out, then copies, then swaps in. No target is also a source."""

    @property
    def ready_host_blocks(self) -> int:
        """The number of host blocks that are ready: plans may swap to blocks 0 to this number - 1. The number never
        shrinks."""
        raise NotImplementedError

    def stage(self, plan: Plan, staging: ZeroCopyColumns) -> BlockMoves:
        """Stage the block ids that `apply` reads on the device."""
        return NO_MOVES

    def apply(self, plan: Plan, moves: BlockMoves) -> None:
        """Move the plan's blocks in stream order. `moves` is what `stage` returned for the plan."""
        raise NotImplementedError

    def prepare_loads(self) -> None:
        """Take the memory that `load` and `save` need on the device. Called at the end of the start, if either will
        be called."""

    def load(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Fill device blocks, which no step uses meanwhile, from (host, device) pairs, behind the moves of all plans
        that were launched, and wait until they are filled. Called in a thread of its own, while steps go on."""
        raise NotImplementedError

    def save(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Fill host blocks, which nobody uses meanwhile, from (device, host) pairs, behind all plans that were
        launched, and wait until they are filled. Called in a thread of its own, while steps go on and may overwrite the
        device's blocks: such copies are not used."""
        raise NotImplementedError

    def host_memory(self, block: int) -> list[memoryview]:
        """Return the memory of a host block that is ready: bytes in one dimension each, of the same sizes for all
        blocks."""
        raise NotImplementedError

    def device_contents(self, block: int) -> list[Tensor]:
        """Return copies of a device block's contents in host memory, once all that was launched is done; equally many
        bytes, in the same order, as `host_memory` has."""
        raise NotImplementedError

    def wait_for_host(self) -> None:
        """Wait until what plans have copied to the host is there, of all plans that were launched."""

    def prepare_host_pool(self) -> None:
        """Start to prepare the host pool's memory in the background. Called at the end of the start."""

    def measure_load_ms(self) -> float:
        """Return how many milliseconds it takes to load a block from the host; 0 where that is not measured. Called at
        the end of the start, while no block holds anything."""
        return 0.0

    def close(self) -> None:
        """Release the host pool's memory. No step may be in flight."""


class CpuBlockTransfer(BlockTransfer):
    """A BlockTransfer on a CPU between two tensors in main memory, `blocks` [storages, blocks, …] and `host` [storages,
    host blocks, …]."""

    def __init__(self, blocks: Tensor, host: Tensor) -> None:
        self._blocks = blocks
        self._host = host
        self._host_bytes: NDArray[np.uint8] | None = None  # [storages, host blocks, bytes]

    @property
    def ready_host_blocks(self) -> int:
        return self._host.shape[1]

    def measure_load_ms(self) -> float:
        device_bytes = self._blocks[:, 0].numel() * self._blocks.element_size()
        number = min(self._blocks.shape[1], self._host.shape[1], max(1, MEASURED_BYTES // max(1, device_bytes)))
        if not number or not device_bytes:
            return 0.0
        pairs = [(number - 1 - place, place) for place in range(number)]
        host = self._blocks[:, :number].clone()  # the host's own blocks may hold something already

        def load_ms() -> float:
            began = time.perf_counter()
            _move(host, self._blocks, pairs)
            return 1e3 * (time.perf_counter() - began) / number

        return min(load_ms() for _ in range(_MEASUREMENTS))

    def apply(self, plan: Plan, moves: BlockMoves) -> None:
        if plan.swap_out:
            _move(self._blocks, self._host, plan.swap_out)
        if plan.copies:
            _move(self._blocks, self._blocks, plan.copies)
        if plan.swap_in:
            _move(self._host, self._blocks, plan.swap_in)

    def load(self, pairs: Sequence[tuple[int, int]]) -> None:
        for first in range(0, len(pairs), _LOADED_AT_ONCE):
            _move(self._host, self._blocks, pairs[first : first + _LOADED_AT_ONCE])

    def save(self, pairs: Sequence[tuple[int, int]]) -> None:
        for first in range(0, len(pairs), _LOADED_AT_ONCE):
            _move(self._blocks, self._host, pairs[first : first + _LOADED_AT_ONCE])

    def host_memory(self, block: int) -> list[memoryview]:
        if self._host_bytes is None:
            self._host_bytes = self._host.flatten(2).view(torch.uint8).numpy()
        return [memoryview(storage[block]) for storage in self._host_bytes]

    def device_contents(self, block: int) -> list[Tensor]:
        return [self._blocks[:, block].clone()]


class JoinedTransfer(BlockTransfer):
    """Combines several transfers whose blocks have the same ids, and moves their blocks together."""

    def __init__(self, first: BlockTransfer, *others: BlockTransfer) -> None:
        self._first = first
        self._all = (first, *others)

    @property
    def ready_host_blocks(self) -> int:
        return min(each.ready_host_blocks for each in self._all)

    def stage(self, plan: Plan, staging: ZeroCopyColumns) -> BlockMoves:
        return self._first.stage(plan, staging)  # block ids: the same for all

    def apply(self, plan: Plan, moves: BlockMoves) -> None:
        for each in self._all:
            each.apply(plan, moves)

    def prepare_loads(self) -> None:
        for each in self._all:
            each.prepare_loads()

    def load(self, pairs: Sequence[tuple[int, int]]) -> None:
        for each in self._all:
            each.load(pairs)

    def save(self, pairs: Sequence[tuple[int, int]]) -> None:
        for each in self._all:
            each.save(pairs)

    def host_memory(self, block: int) -> list[memoryview]:
        return [piece for each in self._all for piece in each.host_memory(block)]

    def device_contents(self, block: int) -> list[Tensor]:
        return [part for each in self._all for part in each.device_contents(block)]

    def wait_for_host(self) -> None:
        for each in self._all:
            each.wait_for_host()

    def prepare_host_pool(self) -> None:
        for each in self._all:
            each.prepare_host_pool()

    def measure_load_ms(self) -> float:
        return sum(each.measure_load_ms() for each in self._all)

    def close(self) -> None:
        for each in self._all:
            each.close()


def _move(sources: Tensor, targets: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    origin, goal = torch.tensor(pairs).unbind(1)
    for source, target in zip(sources, targets, strict=True):
        target.index_copy_(0, goal, source.index_select(0, origin))


class GpuBlockTransfer(BlockTransfer):
    """A BlockTransfer on a GPU. Swaps go through pinned memory on a stream of their own, parallel to the steps' stream.

    A block that is swapped out is first gathered into a staging buffer on the steps' stream, so that it can be
    overwritten at once; the buffer is copied to the host while the step computes. A block that is swapped in is copied
    to another staging buffer, and the step waits for it. What moves beside the steps goes through a `_Lane` for each
    direction, and only who moves it waits. Each run of consecutive host blocks takes one copy. `blocks` is [storages,
    blocks, …] on the device.
    """

    def __init__(self, blocks: Tensor, host_blocks: int) -> None:
        self._blocks = blocks.flatten(2).transpose(0, 1)  # [blocks, storages, elements]
        shape = self._blocks.shape[1:]
        block_bytes = shape.numel() * blocks.element_size()
        staged = max(1, min(STAGING_BYTES // block_bytes, host_blocks)) if host_blocks else 0
        self._outgoing, self._incoming = (
            torch.empty((staged, *shape), dtype=blocks.dtype, device=blocks.device) for _ in range(2)
        )
        self._loads: _Lane | None = None
        self._saves: _Lane | None = None
        self._move_blocks = kernel("move_blocks", blocks.device.type)
        self._pool = PinnedHostPool(host_blocks, shape, blocks.dtype, pin_host_memory, unpin_host_memory)
        self._steps = torch.cuda.current_stream(blocks.device)
        self._stream = torch.cuda.Stream(blocks.device)  # type: ignore[no-untyped-call]
        self._left = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._warm_up()

    def _warm_up(self) -> None:
        """Move the dummy block in every way, so that no kernel is compiled while requests are served."""
        dummy = torch.zeros(1, dtype=torch.int64, device=self._blocks.device)
        self._move_blocks(self._blocks, dummy, self._blocks, dummy)
        if len(self._outgoing):
            self._move_blocks(self._blocks, dummy, self._outgoing, None)
            self._move_blocks(self._outgoing, None, self._blocks, dummy)

    @property
    def ready_host_blocks(self) -> int:
        return self._pool.num_ready

    def prepare_host_pool(self) -> None:
        self._pool.start()

    def close(self) -> None:
        with suppress(RuntimeError):  # a device that failed has said so already
            self._stream.synchronize()
            for lane in (self._loads, self._saves):
                if lane is not None:
                    lane.synchronize()
        self._pool.close()

    def stage(self, plan: Plan, staging: ZeroCopyColumns) -> BlockMoves:
        if not plan.swap_out and not plan.copies and not plan.swap_in:
            return NO_MOVES

        def staged(blocks: list[int]) -> Tensor | None:
            return staging.add(np.array(blocks, dtype=np.int64)) if blocks else None

        return BlockMoves(
            swap_out=staged([device for device, _ in plan.swap_out]),
            copy_sources=staged([source for source, _ in plan.copies]),
            copy_targets=staged([target for _, target in plan.copies]),
            swap_in=staged([device for _, device in plan.swap_in]),
        )

    def apply(self, plan: Plan, moves: BlockMoves) -> None:
        """Move the plan's blocks. Block ids are copied to device memory first, because many programs read each of
        them."""
        if moves.swap_out is not None:
            self._swap_out(to_device_memory(moves.swap_out), [host for _, host in plan.swap_out])
        if moves.copy_sources is not None and moves.copy_targets is not None:
            sources, targets = to_device_memory(moves.copy_sources), to_device_memory(moves.copy_targets)
            self._move_blocks(self._blocks, sources, self._blocks, targets)
        if moves.swap_in is not None:
            self._swap_in(to_device_memory(moves.swap_in), [host for host, _ in plan.swap_in])

    def prepare_loads(self) -> None:
        if len(self._incoming):
            self._loads, self._saves = _Lane(self._incoming), _Lane(self._incoming)

    def load(self, pairs: Sequence[tuple[int, int]]) -> None:
        lane = self._loads
        assert lane is not None, "not prepared, or there is no host block"
        with torch.inference_mode():
            targets = upload([device for _, device in pairs], self._blocks.device)
            lane.wait_for(self._steps, self._stream)  # who used these blocks before, and what is on its way to the host
            for part, place in lane.parts(len(pairs)):
                with torch.cuda.stream(lane.copies):
                    for at, run in self._pool.runs([host for host, _ in pairs[place]]):
                        part[at : at + len(run)].copy_(run, non_blocking=True)
                with lane.behind_copies():
                    self._move_blocks(part, None, self._blocks, targets[place])
            lane.synchronize()

    def save(self, pairs: Sequence[tuple[int, int]]) -> None:
        lane = self._saves
        assert lane is not None, "not prepared, or there is no host block"
        with torch.inference_mode():
            sources = upload([device for device, _ in pairs], self._blocks.device)
            lane.wait_for(self._steps, self._stream)
            for part, place in lane.parts(len(pairs)):
                with torch.cuda.stream(lane.moves):
                    self._move_blocks(self._blocks, sources[place], part, None)
                with lane.behind_moves():
                    for at, run in self._pool.runs([host for _, host in pairs[place]]):
                        run.copy_(part[at : at + len(run)], non_blocking=True)
            lane.synchronize()

    def host_memory(self, block: int) -> list[memoryview]:
        ((_, run),) = self._pool.runs([block])
        memory: NDArray[np.uint8] = run.view(torch.uint8).numpy().reshape(-1)
        return [memoryview(memory)]  # type: ignore[arg-type]

    def device_contents(self, block: int) -> list[Tensor]:
        return [self._blocks[block].cpu()]

    def wait_for_host(self) -> None:
        self._stream.synchronize()

    def _swap_out(self, blocks: Tensor, hosts: Sequence[int]) -> None:
        compute, size = torch.cuda.current_stream(), len(self._outgoing)
        for first in range(0, len(hosts), size):
            compute.wait_event(self._left)  # what was staged before has left
            self._move_blocks(self._blocks, blocks[first : first + size], self._outgoing, None)
            self._stream.wait_stream(compute)
            with torch.cuda.stream(self._stream):
                for place, run in self._pool.runs(hosts[first : first + size]):
                    run.copy_(self._outgoing[place : place + len(run)], non_blocking=True)
                self._left.record(self._stream)

    def _swap_in(self, blocks: Tensor, hosts: Sequence[int]) -> None:
        compute, size = torch.cuda.current_stream(), len(self._incoming)
        for first in range(0, len(hosts), size):
            self._stream.wait_stream(compute)  # what arrived before is in its place
            with torch.cuda.stream(self._stream):
                for place, run in self._pool.runs(hosts[first : first + size]):
                    self._incoming[place : place + len(run)].copy_(run, non_blocking=True)
                self._arrived.record(self._stream)
            compute.wait_event(self._arrived)
            self._move_blocks(self._incoming, None, self._blocks, blocks[first : first + size])


class _Lane:
    """A staging buffer of two halves, between host memory and the cache: while one is copied, the other is moved. Who
    uses a lane waits for its end before the next use.

    Args:
        like: What one part has room for, [blocks, storages, elements] on the device.

    Attributes:
        copies, moves: The streams of copies to or from the host, and of the kernels that move blocks.
    """

    def __init__(self, like: Tensor) -> None:
        half = max(1, len(like) // 2)
        self._halves = [torch.empty_like(like[:half]) for _ in range(2)]
        self.copies = torch.cuda.Stream(like.device)  # type: ignore[no-untyped-call]
        self.moves = torch.cuda.Stream(like.device)  # type: ignore[no-untyped-call]
        self._left = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]
        self._last = self.moves

    def wait_for(self, *streams: torch.cuda.Stream) -> None:
        """Let both streams wait for all that others were given so far, and for what the current one was given."""
        current = torch.cuda.current_stream(self._halves[0].device)
        for own in (self.copies, self.moves):
            for other in (*streams, current):
                own.wait_stream(other)

    def parts(self, count: int) -> Iterator[tuple[Tensor, slice]]:
        """Yield room for so many blocks in parts, each once it is free again, with its place among the blocks."""
        size = len(self._halves[0])
        for number, first in enumerate(range(0, count, size)):
            half, place = number % 2, slice(first, min(count, first + size))
            for own in (self.copies, self.moves):
                own.wait_event(self._left[half])
            yield self._halves[half][: place.stop - place.start], place
            self._left[half].record(self._last)

    @contextmanager
    def behind_copies(self) -> Iterator[None]:
        """Launch kernels behind the copies so far."""
        self.moves.wait_stream(self.copies)
        self._last = self.moves
        with torch.cuda.stream(self.moves):
            yield

    @contextmanager
    def behind_moves(self) -> Iterator[None]:
        """Copy behind the kernels so far."""
        self.copies.wait_stream(self.moves)
        self._last = self.copies
        with torch.cuda.stream(self.copies):
            yield

    def synchronize(self) -> None:
        """Wait until all is done."""
        self.copies.synchronize()
        self.moves.synchronize()
