"""One memory, two tensors."""

from __future__ import annotations

import torch
from torch import Tensor

_KINDS = {2: "<i2", 4: "<i4", 8: "<i8"}


class _Memory:
    """Memory of somebody else's, as numpy and its kin describe it to each other."""

    def __init__(self, x: Tensor) -> None:
        self.__cuda_array_interface__ = {
            "data": (x.data_ptr(), False), "shape": tuple(x.shape), "typestr": _KINDS[x.element_size()],
            "strides": None, "version": 3,
        }  # fmt: skip


def alias_of(x: Tensor, device: torch.device) -> Tensor:
    """x's memory as a tensor of a GPU's that does not keep it from being given to others; x is contiguous, and the
    GPU's or pinned memory of the host, which kernels read and write where it is.
    """
    assert x.is_contiguous()
    alias = torch.as_tensor(_Memory(x), device=device)
    assert alias.data_ptr() == x.data_ptr(), "a copy: the memory belongs to another device"
    return alias.view(x.dtype)
