"""Quire: an LLM inference and serving engine.

`LLM`, `SamplingParams` and `BeamSearchParams` are the offline front door; `quire serve` is the server. The names are
loaded on first use: `import quire` imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quire.version import __version__

if TYPE_CHECKING:
    from quire.beam_search import BeamSearchParams as BeamSearchParams
    from quire.offline.llm import LLM as LLM
    from quire.sampling import SamplingParams as SamplingParams

__all__ = ["LLM", "BeamSearchParams", "SamplingParams", "__version__"]

_EXPORTS = {
    "BeamSearchParams": "quire.beam_search",
    "LLM": "quire.offline.llm",
    "SamplingParams": "quire.sampling",
}


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'quire' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module(_EXPORTS[name]), name)
