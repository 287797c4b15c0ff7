"""The modules of vLLM that scripts import by name (such as `quire.lora.request`), and those that guides run with `-m`.

Two tables stand for files of one line each. `quire` itself exports every name, and a module passes some on.
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
    "quire.entrypoints": (),
    "quire.entrypoints.llm": ("LLM",),
    "quire.entrypoints.openai": (),
    "quire.inputs": ("TextPrompt", "TokensPrompt"),
    "quire.lora": (),
    "quire.lora.request": ("LoRARequest",),
    "quire.v1": (),
    "quire.v1.engine": (),
    "quire.v1.engine.async_llm": ("AsyncLLM",),
    "quire.v1.engine.llm_engine": ("LLMEngine",),
}
"""The names of each module, by its path."""
COMMANDS: dict[str, tuple[str, ...]] = {
    "quire.benchmark_latency": ("bench", "latency"),
    "quire.benchmark_throughput": ("bench", "throughput"),
    "quire.entrypoints.openai.api_server": ("serve",),
    "quire.entrypoints.openai.run_batch": ("run-batch",),
}
"""The command of `quire` that `python -m` runs for each path."""
_RUN = """import sys
from quire.cli.main import main
if __name__ == "__main__":
    main({command} + sys.argv[1:])
"""


class _Loader(InspectLoader):
    def get_source(self, fullname: str) -> str:
        if fullname in COMMANDS:
            return _RUN.format(command=list(COMMANDS[fullname]))
        names = NAMES[fullname]
        return "".join(f"from quire import {name}\n" for name in names) + f"__all__ = {list(names)}\n"

    def is_package(self, fullname: str) -> bool:
        return any(path.startswith(f"{fullname}.") for path in (*NAMES, *COMMANDS))


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return spec_from_loader(fullname, _Loader()) if fullname in NAMES or fullname in COMMANDS else None


def install() -> None:
    """Let Python find the modules of the tables, unless a file exists for them."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
