"""What the client checks of a request that is pooled, against what the model does."""

from __future__ import annotations

from msgspec.structs import replace

from quire.errors import RequestError
from quire.foundation.messages.from_engine import PoolingInfo
from quire.pooling_params import PoolingParams

_ENDPOINTS = {
    "embed": "/v1/embeddings",
    "classify": "/classify",
    "score": "/score or /rerank",
    "token_embed": "/pooling",
    "token_classify": "/pooling",
}
"""Where each task is served."""
_OF_EMBEDDINGS = ("embed", "token_embed")


def resolve_pooling(params: PoolingParams, info: PoolingInfo) -> PoolingParams:
    """Check a request's parameters against what the model does, and fill in its task.

    Raises:
        RequestError: The model does not do this task, has no vectors of this length, or would ignore a field.
    """
    check_pools(info)
    task = params.task or info.tasks[0]
    if task not in info.tasks:
        raise RequestError(f"This model does not do the task {task}; it does {tasks_served(info)}.", param="task")
    if params.dimensions is not None:
        _check_dimensions(params.dimensions, task in _OF_EMBEDDINGS, info)
    if params.step_tag_id is not None and task != "token_classify":
        raise RequestError("step_tag_id is for the task token_classify alone: leave it out.", param="step_tag_id")
    if params.returned_token_ids is not None:
        _check_returned(params.returned_token_ids, task == "token_classify", info)
    return replace(params, task=task)


def check_pools(info: PoolingInfo) -> None:
    """Raises RequestError if a model makes nothing of whole texts."""
    if not info.tasks:
        raise RequestError(
            "This model generates text, and makes no vectors of texts: its files do not say how. Start the server with "
            "--pooler-config, or with an embedding model.",
            param="model",
        )


def tasks_served(info: PoolingInfo) -> str:
    """What a model makes of whole texts, and where, for errors."""
    return ", ".join(f"{task} ({_ENDPOINTS[task]})" for task in info.tasks)


def _check_dimensions(dimensions: int, embeds: bool, info: PoolingInfo) -> None:
    if not embeds:
        raise RequestError("dimensions is for embeddings alone: leave it out.", param="dimensions")
    if dimensions == info.dim:
        return
    if not info.matryoshka:
        raise RequestError(
            f"This model's embeddings have {info.dim} dimensions and may not be shortened, got {dimensions}: leave "
            "dimensions out.",
            param="dimensions",
        )
    if info.dimensions and dimensions not in info.dimensions:
        known = ", ".join(map(str, sorted({*info.dimensions, info.dim})))
        raise RequestError(f"dimensions must be one of {known}, got {dimensions}.", param="dimensions")
    if dimensions > info.dim:
        raise RequestError(f"dimensions must be at most {info.dim}, got {dimensions}.", param="dimensions")


def _check_returned(ids: list[int], classifies: bool, info: PoolingInfo) -> None:
    if not classifies:
        raise RequestError(
            "returned_token_ids is for the task token_classify alone: leave it out.", param="returned_token_ids"
        )
    if not ids or max(ids) >= len(info.labels):
        raise RequestError(
            f"returned_token_ids must name some of {len(info.labels)} labels, got {ids}.", param="returned_token_ids"
        )
