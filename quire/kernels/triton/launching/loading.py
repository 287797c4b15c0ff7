"""Loading what launches kernels, in many threads at once.

Triton 3.6 compiles a C module for each signature of a kernel, and calls all of them by one name. CPython gives modules
of a name that it has loaded before one and the same object, and puts the contents of the last one into it: a thread
that takes its launcher from there may find another thread's, which reads other arguments. Later Tritons have one
launcher for all.
"""

from __future__ import annotations

import threading
from types import ModuleType
from typing import Any

from triton.runtime import build

_lock = threading.Lock()


def load_apart() -> None:
    """From now on each module that Triton loads is an object of its own."""
    load = getattr(build, "_load_module_from_path", None)
    if load is None or hasattr(load, "apart"):
        return

    def load_one(name: str, *where: Any, **named: Any) -> ModuleType:
        module = ModuleType(name)
        with _lock:
            module.__dict__.update(load(name, *where, **named).__dict__)
        return module

    load_one.apart = True  # type: ignore[attr-defined]
    build._load_module_from_path = load_one
