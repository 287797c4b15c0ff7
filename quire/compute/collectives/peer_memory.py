"""Memory of a card that processes of other cards of the same host map, by the driver alone: torch does not know it.

The current context must be that of the card, as torch makes it.
"""

from __future__ import annotations

import ctypes

HANDLE_BYTES = 64
_BLOCK = 1 << 21
"""Bytes that the driver takes at once. Less may lie in a block with other memory, all of which would be shared."""
_LAZY_ENABLE_PEER_ACCESS = 1


class PeerMemoryError(Exception):
    """The driver does not let cards share memory here; the message is its name for the reason."""


class _Handle(ctypes.Structure):
    """CUipcMemHandle, which is handed over by value."""

    _fields_ = [("bytes", ctypes.c_char * HANDLE_BYTES)]


class OwnMemory:
    """Memory of this card, zeros at first.

    Args:
        size: Bytes, at least.

    Attributes:
        address: Where it begins, for this process.
        handle: By which other processes map it.

    Raises:
        PeerMemoryError: There is none to be had, or none that can be shared.
    """

    def __init__(self, size: int) -> None:
        self._driver = _load_driver()
        address, size = ctypes.c_uint64(), -(-size // _BLOCK) * _BLOCK
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        self.address = address.value
        self._call("cuMemsetD8_v2", address, ctypes.c_ubyte(0), ctypes.c_size_t(size))
        self._call("cuCtxSynchronize")
        handle = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        self.handle = bytes(memoryview(handle))

    def close(self) -> None:
        """Give it back; nobody uses it any more."""
        self._driver.cuMemFree_v2(ctypes.c_uint64(self.address))

    def _call(self, name: str, *arguments: object) -> None:
        _check(self._driver, name, *arguments)


class MappedMemory:
    """Another process's OwnMemory.

    Args:
        handle: Its handle.

    Attributes:
        address: Where it begins here.

    Raises:
        PeerMemoryError: It cannot be mapped.
    """

    def __init__(self, handle: bytes) -> None:
        self._driver = _load_driver()
        address = ctypes.c_uint64()
        own = _Handle.from_buffer_copy(handle)
        _check(
            self._driver, "cuIpcOpenMemHandle_v2", ctypes.byref(address), own, ctypes.c_uint(_LAZY_ENABLE_PEER_ACCESS)
        )
        self.address = address.value

    def close(self) -> None:
        """Unmap it."""
        self._driver.cuIpcCloseMemHandle(ctypes.c_uint64(self.address))


def _load_driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise PeerMemoryError(str(error)) from None


def _check(driver: ctypes.CDLL, name: str, *arguments: object) -> None:
    code = getattr(driver, name)(*arguments)
    if code:
        text = ctypes.c_char_p()
        driver.cuGetErrorName(code, ctypes.byref(text))
        raise PeerMemoryError(f"{name} says {(text.value or b'?').decode()}")
