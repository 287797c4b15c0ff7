"""What the copy engine is told of a tensor that it takes tiles of.

Making one of Triton's TensorDescriptors, and saying what a kernel is specialised by for it, takes some 3 µs: as long as
everything else of a launch, where three are given. Here one is made for each address, shape and cut that comes, and a
step's tensors come to the same addresses layer after layer. It knows the address alone and keeps no tensor, so memory
is free when its tensors are.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

_MOST = 4_096
"""Descriptors that are kept: a weight of each layer of a large model, and what comes and goes."""

_KIND = "_quire_kind"
"""Where a descriptor has what `specialization_of` said of it."""


class _Memory(NamedTuple):
    """As much of a tensor as Triton asks a descriptor's for."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        """In bytes; 16 divides it."""
        return self.address


def tensor_descriptor(
    x: Tensor,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    tile: tuple[int, ...],
    layout: gl.NVMMASharedLayout,
) -> TensorDescriptor:
    """A descriptor of the memory of `x`, as this shape, in tiles that stand in shared memory in this layout.

    Args:
        x: Begins where 16 bytes do.
        shape: Entries along each axis.
        strides: Entries from one to the next along each axis. The last is 1; of the others 16 bytes are a divisor.
        tile: Entries of a tile along each axis.
        layout: Of a tile.
    """
    return _tensor_descriptor(x.data_ptr(), x.dtype, shape, strides, tile, layout)


@functools.lru_cache(_MOST)
def _tensor_descriptor(
    address: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    tile: tuple[int, ...],
    layout: gl.NVMMASharedLayout,
) -> TensorDescriptor:
    return TensorDescriptor(_Memory(address, dtype), [*shape], [*strides], [*tile], layout)


def specialization_of(descriptor: TensorDescriptor) -> str:
    """What a kernel is specialised by."""
    kind: str | None = getattr(descriptor, _KIND, None)
    if kind is None:
        kind = f"{descriptor.base.dtype} {descriptor.block_shape} {descriptor.layout}"
        setattr(descriptor, _KIND, kind)
    return kind
