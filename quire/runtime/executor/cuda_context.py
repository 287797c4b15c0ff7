"""The driver's context of a GPU, which takes long to make and needs no torch: made while torch is still imported."""

from __future__ import annotations

import ctypes


def open_context() -> None:
    """Make the context of the first GPU and keep it; torch will find it there. If that fails, torch will say why."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
