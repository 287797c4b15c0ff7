"""Host memory: lazily allocated zeros, pinned memory for asynchronous uploads and for kernels that read it in place."""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Values = Sequence[int] | Sequence[float] | Sequence[Sequence[int]] | npt.NDArray[np.generic]
_PORTABLE = 1
"""The flag cudaHostRegisterPortable: memory is pinned for all contexts of the process."""
_TYPE_STRINGS = {2: "<i2", 4: "<i4", 8: "<i8"}
"""Type strings of `__cuda_array_interface__`, by bytes of an entry."""


def lazy_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of zeros. On a CPU numpy makes it, because numpy takes each page at its first write; torch would
    write all pages at once.

    Raises:
        RuntimeError, MemoryError, ValueError: There is not enough memory.
    """
    if device.type != "cpu":
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    plain = torch.from_numpy(np.zeros(max(size, dtype.itemsize), dtype=np.uint8)).view(dtype)
    return plain[: math.prod(shape)].view(tuple(shape))


def trim_heap() -> None:
    """Return freed memory that the C library keeps to the system, if the library supports it: glibc keeps about a fifth
    of the weights' size, since each weight is copied before it is packed."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def upload(values: Values, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Copy `values` to the device in stream order. They are pinned first, because a pageable copy would wait for the
    stream."""
    if device.type == "cpu":
        return torch.as_tensor(values, dtype=dtype)
    return torch.as_tensor(values, dtype=dtype).pin_memory().to(device, non_blocking=True)


def pin_host_memory(size: int) -> Tensor:
    """Return [size] uint8 of pinned memory. Its pages are taken before they are registered, because the driver blocks
    launches of all threads while it registers memory.

    Raises:
        RuntimeError: The system gives no more memory, or pins no more.
    """
    try:
        memory = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
    except OSError as error:
        raise RuntimeError(str(error)) from None
    ctypes.memset(memory.data_ptr(), 0, size)  # releases the interpreter's lock
    code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), size, _PORTABLE))  # type: ignore[no-untyped-call]
    if code:
        raise RuntimeError(f"cudaHostRegister of {size} bytes failed with error {code}")
    return memory


def unpin_host_memory(memory: Tensor) -> None:
    """Release memory from `pin_host_memory`. Nothing may use it any more."""
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]


def unowned_view(x: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on the GPU `device` over the memory of `x`, without keeping that memory alive. `x` is contiguous,
    and on that GPU or in pinned host memory, which kernels then read and write in place."""
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
