"""Quire: an LLM inference and serving engine.

`LLM` and `SamplingParams` are the offline front door; `quire serve` is the server. Both names are loaded on first use:
`import quire` imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.llm import LLM as LLM
    from quire.sampling import SamplingParams as SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]

_EXPORTS = {"LLM": "quire.llm", "SamplingParams": "quire.sampling"}


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'quire' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module(_EXPORTS[name]), name)
