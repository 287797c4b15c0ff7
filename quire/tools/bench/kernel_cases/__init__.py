"""The cases of the kernel benchmark: a call of an op on arguments like those of a real step, and the least it must do.

Each module of this package belongs to one family of `quire.compute.kernels` and has two sequences of cases: `CASES` of
shapes that matter on a GPU, and `SMALL_CASES` of the same ops in a few milliseconds on any processor.
`quire.tools.bench.kernels` finds the modules by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

ITEM, INT = 2, 8
"""Bytes of a bf16 number and of an int64 one."""
Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of one call, by position and by name."""


@dataclass(frozen=True)
class KernelCase:
    """One call of an op.

    Attributes:
        op: Its name in `quire.compute.kernels.dispatch`.
        name: The shapes in few words (`128 × 4096`), unlike those of other cases of the op.
        make: Makes fresh random arguments on a device, never zeros. Each call of a measurement gets its own, in other
            memory. Weights that the device packs are packed here.
        bytes: The least that a call moves through memory: each input read once, each output written once. Of a paged
            cache only what is read counts, and of experts only those that tokens go to.
        flops: Floating point operations of the result; 0 where they do not matter.
    """

    op: str
    name: str
    make: Callable[[torch.device], Arguments]
    bytes: int
    flops: int = 0


def normal(device: torch.device, *shape: int) -> torch.Tensor:
    """Random bf16 numbers."""
    return torch.randn(shape, dtype=torch.bfloat16, device=device)


def normals(device: torch.device, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [normal(device, *shape) for shape in shapes]


def scaled_normal(device: torch.device, *shape: int) -> torch.Tensor:
    """Random bf16 numbers whose products over the last dimension are of usual size."""
    return normal(device, *shape).div_(shape[-1] ** 0.25)


def on(device: torch.device, *values: Any) -> Arguments:
    """Arguments by position. Tensors, also those in tuples, are moved to the device."""
    return tuple(_moved(value, device) for value in values), {}


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        moved = (_moved(each, device) for each in value)
        return type(value)(*moved) if hasattr(value, "_fields") else tuple(moved)
    return value
