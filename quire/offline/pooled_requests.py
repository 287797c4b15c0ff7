"""Requests of the engine in this process that are pooled: their parameters, and what comes of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from quire.engine.pooling_requests import resolve_pooling
from quire.errors import GenerationError, RequestError
from quire.foundation.messages.from_engine import End, PoolingInfo
from quire.foundation.messages.to_engine import Adapter
from quire.offline.local_engine import LocalEngine
from quire.offline.texts import PooledText
from quire.outputs import PoolingOutput, PoolingRequestOutput
from quire.pooling_params import PoolingParams, PoolingTask
from quire.text.sequence_accumulator import SequenceAccumulator

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


def params_of(given: PoolingParams | None, task: PoolingTask | None, info: PoolingInfo) -> PoolingParams:
    """Return checked parameters for a method's task. Raises RequestError for what the model does not do."""
    params = given or PoolingParams()
    if not isinstance(params, PoolingParams):
        raise RequestError(
            f"pooling_params must be PoolingParams, got {type(params).__name__}.", param="pooling_params"
        )
    if task is not None and params.task not in (None, task):
        raise RequestError(f"This method's task is {task}, got {params.task}.", param="task")
    return resolve_pooling(replace(params, task=task or params.task), info)


def pooled_sequence(
    local: LocalEngine, text: PooledText, params: PoolingParams, priority: int = 0, adapter: Adapter | None = None
) -> SequenceAccumulator:
    """Return what collects a text's vector, and has the Add that asks the engine for it."""
    (add,) = local.input_processor.pooled(
        text.tokens,
        params,
        priority=priority,
        cache_salt=text.cache_salt,
        token_types=text.token_types,
        prompt_skip=text.skip,
        adapter=adapter,
    )
    return local.sequence(add, 0)


def pooled_output(name: str, sequence: SequenceAccumulator) -> PoolingRequestOutput[Any]:
    """Return what was made of a text, as a tensor. Raises GenerationError if nothing was, because it was aborted."""
    end = end_of(sequence.end)
    return PoolingRequestOutput(name, PoolingOutput(tensor_of(end)), sequence.add.tokens, end.cached_tokens)


def end_of(end: End | None) -> End:
    """Return the end of a request that has a vector. Raises GenerationError if it has none, because it was aborted."""
    if end is None or not end.vector_shape:
        raise GenerationError("The text has no vector: its request was ended.")
    return end


def values_of(end: End) -> npt.NDArray[np.float32]:
    """Return the vector of a text, or of its tokens: [dim] or [tokens, dim]."""
    import numpy as np

    return np.frombuffer(end.vector, dtype="<f4").reshape(end.vector_shape)


def tensor_of(end: End) -> Any:
    """Return the vector of a text, or of its tokens, as a tensor: [dim] or [tokens, dim] float32."""
    import torch

    return torch.frombuffer(bytearray(end.vector), dtype=torch.float32).view(end.vector_shape)
