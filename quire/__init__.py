"""Quire: an LLM inference and serving engine.

`LLM`, `AsyncLLM`, `SamplingParams`, `PoolingParams` and `BeamSearchParams` are the offline front door; `quire serve` is
the server. The names are loaded on first use: `import quire` imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quire import import_paths
from quire.version import __version__ as __version__

if TYPE_CHECKING:
    from quire.offline.adapters import LoRARequest as LoRARequest
    from quire.offline.async_llm import AsyncEngineArgs as AsyncEngineArgs
    from quire.offline.async_llm import AsyncLLM as AsyncLLM
    from quire.offline.async_llm import AsyncLLMEngine as AsyncLLMEngine
    from quire.offline.async_llm import EngineArgs as EngineArgs
    from quire.offline.llm import LLM as LLM
    from quire.offline.llm_engine import LLMEngine as LLMEngine
    from quire.offline.prompts import TextPrompt as TextPrompt
    from quire.offline.prompts import TokensPrompt as TokensPrompt
    from quire.outputs import ClassificationOutput as ClassificationOutput
    from quire.outputs import ClassificationRequestOutput as ClassificationRequestOutput
    from quire.outputs import CompletionOutput as CompletionOutput
    from quire.outputs import EmbeddingOutput as EmbeddingOutput
    from quire.outputs import EmbeddingRequestOutput as EmbeddingRequestOutput
    from quire.outputs import PoolingOutput as PoolingOutput
    from quire.outputs import PoolingRequestOutput as PoolingRequestOutput
    from quire.outputs import RequestOutput as RequestOutput
    from quire.outputs import ScoringOutput as ScoringOutput
    from quire.outputs import ScoringRequestOutput as ScoringRequestOutput
    from quire.pooling_params import PoolingParams as PoolingParams
    from quire.sampling_params import BeamSearchParams as BeamSearchParams
    from quire.sampling_params import RequestOutputKind as RequestOutputKind
    from quire.sampling_params import SamplingParams as SamplingParams
    from quire.structured_outputs_params import GuidedDecodingParams as GuidedDecodingParams
    from quire.structured_outputs_params import StructuredOutputsParams as StructuredOutputsParams

_EXPORTS = {
    "AsyncEngineArgs": "quire.offline.async_llm",
    "AsyncLLM": "quire.offline.async_llm",
    "AsyncLLMEngine": "quire.offline.async_llm",
    "BeamSearchParams": "quire.sampling_params",
    "ClassificationOutput": "quire.outputs",
    "ClassificationRequestOutput": "quire.outputs",
    "CompletionOutput": "quire.outputs",
    "EmbeddingOutput": "quire.outputs",
    "EmbeddingRequestOutput": "quire.outputs",
    "EngineArgs": "quire.offline.async_llm",
    "GuidedDecodingParams": "quire.structured_outputs_params",
    "LLM": "quire.offline.llm",
    "LLMEngine": "quire.offline.llm_engine",
    "LoRARequest": "quire.offline.adapters",
    "PoolingOutput": "quire.outputs",
    "PoolingParams": "quire.pooling_params",
    "PoolingRequestOutput": "quire.outputs",
    "RequestOutput": "quire.outputs",
    "RequestOutputKind": "quire.sampling_params",
    "SamplingParams": "quire.sampling_params",
    "ScoringOutput": "quire.outputs",
    "ScoringRequestOutput": "quire.outputs",
    "StructuredOutputsParams": "quire.structured_outputs_params",
    "TextPrompt": "quire.offline.prompts",
    "TokensPrompt": "quire.offline.prompts",
}
__all__ = [*_EXPORTS, "__version__"]
import_paths.install()
_LOAD_TORCH = {"LLM", "LLMEngine", "AsyncLLM", "AsyncLLMEngine"}


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'quire' has no attribute '{name}'")
    import importlib

    if name in _LOAD_TORCH:
        importlib.import_module("quire.runtime.executor.early_loading").begin_loading()
    return getattr(importlib.import_module(_EXPORTS[name]), name)
