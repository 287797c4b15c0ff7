"""Loads torch's largest library and the driver's context of a GPU in threads beside Python's imports.

Linking libtorch_cpu.so takes a sixth of the time that importing torch does. It is loaded ahead only for a torch
that was built for the CPU: another one loads CUDA's libraries first.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
import threading
from pathlib import Path

from quire.foundation.processes import late_meta_kernels


def begin_loading(*, meta_kernels: bool = True) -> None:
    """Begin to load torch's largest library, and return at once. If there is none, importing torch reports that.

    Without `meta_kernels`, torch is imported without those for the meta device: see late_meta_kernels.py.

    The linker's lock is held all the time, so modules with libraries of their own wait. numpy has most of them, and is
    imported before.
    """
    import numpy  # noqa: F401

    if "torch" in sys.modules or (library := _library()) is None:
        return
    from quire.foundation.config import environment  # a twentieth of a second, for which an early engine is not to wait

    environment.limit_openmp_spinning()
    if not meta_kernels:
        late_meta_kernels.leave_out()
    threading.Thread(target=_load, args=(library,), name="torch-library", daemon=True).start()


def open_context() -> None:
    """Make the driver's context of the first GPU, where torch will find it. If that fails, torch reports why."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)


def torch_is_for_cpus() -> bool:
    """Whether torch is installed and was built for CPUs only. Does not import it."""
    return _library() is not None


def _library() -> Path | None:
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    libraries = Path(found.origin).parent / "lib"
    library = libraries / "libtorch_cpu.so"
    return library if library.exists() and not (libraries / "libtorch_cuda.so").exists() else None


def _load(library: Path) -> None:
    """Load a library by a foreign function, which runs without the interpreter's lock; `ctypes.CDLL` would hold it."""
    ctypes.CDLL(None).dlopen(str(library).encode(), os.RTLD_NOW)
