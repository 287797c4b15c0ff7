"""Memory of a card that processes of other cards of the same host map, through the driver, without torch.

The current context must be the card's, as torch makes it.
"""

from __future__ import annotations

import ctypes

HANDLE_BYTES = 64
_BLOCK = 1 << 21
"""Bytes that the driver allocates at once. Less could share a block with other memory, which would be mapped too."""
_LAZY_ENABLE_PEER_ACCESS = 1


class PeerMemoryError(Exception):
    """The driver does not let cards share memory; the message is its name for the reason."""


class _Handle(ctypes.Structure):
    """CUipcMemHandle, which is passed by value."""

    _fields_ = [("bytes", ctypes.c_char * HANDLE_BYTES)]


class OwnMemory:
    """At least `size` bytes of this card, zero at first, at `address` in this process; other processes map them by
    `handle`. Raises PeerMemoryError if there is not enough memory, or it cannot be shared."""

    def __init__(self, size: int) -> None:
        address, size, handle = ctypes.c_uint64(), -(-size // _BLOCK) * _BLOCK, _Handle()
        _call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        _call("cuMemsetD8_v2", address, ctypes.c_ubyte(0), ctypes.c_size_t(size))
        _call("cuCtxSynchronize")
        _call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        self.address, self.handle = address.value, bytes(memoryview(handle))


class MappedMemory:
    """Another process's OwnMemory, by its `handle`, at `address` in this process. Raises PeerMemoryError if it cannot
    be mapped."""

    def __init__(self, handle: bytes) -> None:
        address, own = ctypes.c_uint64(), _Handle.from_buffer_copy(handle)
        _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), own, ctypes.c_uint(_LAZY_ENABLE_PEER_ACCESS))
        self.address = address.value


def _call(name: str, *arguments: object) -> None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise PeerMemoryError(str(error)) from None
    if code := getattr(driver, name)(*arguments):
        text = ctypes.c_char_p()
        driver.cuGetErrorName(code, ctypes.byref(text))
        raise PeerMemoryError(f"{name} says {(text.value or b'?').decode()}")
