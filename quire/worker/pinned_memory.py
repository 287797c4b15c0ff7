"""Host values and memory as the device sees them: uploads that do not wait, and views of memory that is used in place.

Knows nothing about what the values mean.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Values = Sequence[int] | Sequence[float] | Sequence[Sequence[int]] | npt.NDArray[np.generic]
_TYPE_STRINGS = {2: "<i2", 4: "<i4", 8: "<i8"}
"""By bytes of an entry; see `__cuda_array_interface__`."""


def upload(values: Values, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """`values` on the device, in stream order. They are pinned first, because a pageable copy would wait for the
    stream.
    """
    if device.type == "cpu":
        return torch.as_tensor(values, dtype=dtype)
    return torch.as_tensor(values, dtype=dtype).pin_memory().to(device, non_blocking=True)


def unowned_view(x: Tensor, device: torch.device) -> Tensor:
    """x's memory as a tensor on the GPU that does not keep the memory alive.

    Args:
        x: Contiguous; on that GPU, or in pinned host memory, which kernels then read and write in place.
        device: The GPU.
    """
    assert x.is_contiguous()
    view = torch.as_tensor(_ArrayInterface(x), device=device)
    assert view.data_ptr() == x.data_ptr(), "a copy: the memory belongs to another device"
    return view.view(x.dtype)


class _ArrayInterface:
    """Describes x's memory to torch without a reference to x."""

    def __init__(self, x: Tensor) -> None:
        self.__cuda_array_interface__ = {
            "data": (x.data_ptr(), False), "shape": tuple(x.shape), "typestr": _TYPE_STRINGS[x.element_size()],
            "strides": None, "version": 3,
        }  # fmt: skip
