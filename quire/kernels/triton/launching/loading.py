"""Loading what launches kernels, in many threads at once.

Triton 3.6 compiles a C module for each signature of a kernel, and calls all of them by one name. CPython gives modules
of a name that it has loaded before one and the same object, and puts the contents of the last one into it: a thread
that takes its launcher from there may find another thread's, which reads other arguments. Later Tritons have one
launcher for all.
"""

from __future__ import annotations

import threading
from types import ModuleType

from triton.runtime import build

_lock = threading.Lock()


def load_one_by_one() -> None:
    """From now on each module that Triton loads is an object of its own."""
    load = build._load_module_from_path
    if getattr(load, "one_by_one", False):
        return

    def load_apart(name: str, path: str) -> ModuleType:
        apart = ModuleType(name)
        with _lock:
            apart.__dict__.update(load(name, path).__dict__)
        return apart

    load_apart.one_by_one = True  # type: ignore[attr-defined]
    build._load_module_from_path = load_apart
