"""Imports torch without its kernels for the meta device, a quarter of the time that torch takes, until somebody wants
them.

Importing torch imports `torch._meta_registrations`, which takes along torch's decompositions and references. They
compute shapes for the meta device, for fake tensors and for `torch.compile`: nothing that an engine on CPUs does with a
model of its own.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, cast

_KERNELS = "torch._meta_registrations"
_NEED_THEM = {"torch._decomp", "torch._dynamo", "torch._prims", "torch._refs", "transformers"}
"""What imports them for their effect, and what uses the meta device."""


def leave_out() -> None:
    """Let torch be imported without these kernels, if it has not been imported yet."""
    if "torch" not in sys.modules:
        sys.meta_path.insert(0, _Finder())


def load() -> None:
    """Import the kernels now, if they were left out. Code of users is loaded after this, as it may want them."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
        if sys.modules.pop(_KERNELS, None) is not None:
            importlib.import_module(_KERNELS)


class _Finder:
    """Finds an empty module in the kernels' place, and loads them before the first module that needs them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == _KERNELS:
            return ModuleSpec(fullname, cast(Any, self))
        if fullname in _NEED_THEM:
            load()
            if (module := sys.modules.get(fullname)) is not None:  # the kernels have imported it
                loaded = ModuleSpec(fullname, cast(Any, _Loaded(module)))
                module.__spec__ = loaded  # Python asks the module, as it is there
                return loaded
        return None

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        def __getattr__(name: str) -> object:
            if name.startswith("__"):
                raise AttributeError(name)
            load()
            return getattr(sys.modules[_KERNELS], name)

        vars(module)["__getattr__"] = __getattr__


class _Loaded:
    """Gives a module that was imported while it was looked for."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec
