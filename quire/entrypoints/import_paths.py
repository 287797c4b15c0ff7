"""The modules of vLLM that scripts import by name: `quire.lora.request`, `quire.engine.arg_utils` and others.

A table stands for files of one line each. `quire` itself exports every name; a module of the table passes some on.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType

NAMES: dict[str, tuple[str, ...]] = {
    "quire.engine.arg_utils": ("AsyncEngineArgs", "EngineArgs"),
    "quire.engine.async_llm_engine": ("AsyncEngineArgs", "AsyncLLMEngine"),
    "quire.engine.llm_engine": ("LLMEngine",),
    "quire.entrypoints.llm": ("LLM",),
    "quire.inputs": ("TextPrompt", "TokensPrompt"),
    "quire.lora": (),
    "quire.lora.request": ("LoRARequest",),
    "quire.v1": (),
    "quire.v1.engine": (),
    "quire.v1.engine.async_llm": ("AsyncLLM",),
    "quire.v1.engine.llm_engine": ("LLMEngine",),
}
"""What each module has, by its path."""


class _Loader(InspectLoader):
    def get_source(self, fullname: str) -> str:
        names = NAMES[fullname]
        return "".join(f"from quire import {name}\n" for name in names) + f"__all__ = {list(names)}\n"

    def is_package(self, fullname: str) -> bool:
        return any(path.startswith(f"{fullname}.") for path in NAMES)


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return spec_from_loader(fullname, _Loader()) if fullname in NAMES else None


def install() -> None:
    """Let Python find the modules of the table, behind all files that exist."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
