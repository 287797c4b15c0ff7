"""Reads --pooler-config, whose keys are vLLM's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from quire.errors import ConfigError, did_you_mean
from quire.models.sentence_files import Mode, TokenValues
from quire.pooling_params import TASKS, PoolingTask

_TYPES: dict[str, Mode] = {
    "CLS": "cls",
    "LAST": "last",
    "MEAN": "mean",
    "MAX": "max",
    "MEAN_SQRT_LEN": "mean_sqrt_len",
    "WEIGHTED_MEAN": "weighted_mean",
}
"""Modes by their names in --pooler-config; the first three are vLLM's."""
_SPLADE = "SPLADE"
"""The largest log(1 + max(logit, 0)) of all tokens, for each token of the vocabulary (Formal et al. 2021)."""
_TOKEN_TYPES: Mapping[str, Literal["ALL", "STEP"]] = {"ALL": "ALL", "STEP": "STEP"}
_KEYS = (
    "pooling_type", "seq_pooling_type", "tok_pooling_type", "use_activation", "normalize", "dimensions",
    "enable_chunked_processing", "max_embed_len", "logit_mean", "logit_sigma", "step_tag_id", "returned_token_ids",
    "task",
)  # fmt: skip
"""Keys of --pooler-config."""


@dataclass(frozen=True)
class GivenPooling:
    """--pooler-config, checked. `modes` is empty and others are None where it says nothing.

    Attributes:
        modes: How a vector is made of a text's states.
        tokens: Whether tokens have vectors or values of their own: ALL of them, or those of a STEP.
        activates, step_tag_id, returned_token_ids, logit_mean, logit_sigma: See PoolerSpec.
        token_values: How values of tokens become a vector.
        dimensions: Length of embeddings.
        task: The default task.
    """

    modes: tuple[Mode, ...] = ()
    tokens: Literal["ALL", "STEP"] | None = None
    token_values: TokenValues | None = None
    activates: bool | None = None
    dimensions: int | None = None
    logit_mean: float = 0.0
    logit_sigma: float = 1.0
    step_tag_id: int | None = None
    returned_token_ids: tuple[int, ...] | None = None
    task: PoolingTask | None = None

    @classmethod
    def of(cls, keys: Mapping[str, Any]) -> GivenPooling:
        """Read --pooler-config. Raises ConfigError for what is unknown or not served."""
        for key in keys:
            if key not in _KEYS:
                raise _wrong(f"has no key '{key}'.{did_you_mean(key, _KEYS)}")
        is_splade = str(keys.get("pooling_type")).upper() == _SPLADE
        modes, tokens = _types(keys) if not is_splade else ((), None)
        sigma = _number(keys, "logit_sigma", 1.0)
        if sigma == 0:
            raise _wrong("logit_sigma must not be 0.")
        for key in ("enable_chunked_processing", "max_embed_len"):
            if keys.get(key):
                raise _wrong(f"{key} is not supported: texts longer than the model's limit are refused.")
        tag = _natural(keys, "step_tag_id")
        if (tag is not None) != (tokens == "STEP"):
            raise _wrong("step_tag_id and the pooling type STEP belong together.")
        task = keys.get("task")
        if task is not None and task not in TASKS:
            raise _wrong(f"task must be one of {', '.join(TASKS)}.")
        returned = keys.get("returned_token_ids")
        if returned is not None and not (isinstance(returned, list) and all(is_natural(each) for each in returned)):
            raise _wrong("returned_token_ids must be a list of whole numbers.")
        return cls(
            modes=modes,
            tokens=tokens,
            token_values=TokenValues("max", 1) if is_splade else None,
            activates=_flag(keys, "use_activation", _flag(keys, "normalize", None)),
            dimensions=_natural(keys, "dimensions"),
            logit_mean=_number(keys, "logit_mean", 0.0),
            logit_sigma=sigma,
            step_tag_id=tag,
            returned_token_ids=None if returned is None else tuple(returned),
            task=task,
        )


def _types(keys: Mapping[str, Any]) -> tuple[tuple[Mode, ...], Literal["ALL", "STEP"] | None]:
    """Return the modes of whole texts, and the type of pooling tokens."""
    modes = tuple[Mode, ...]()
    tokens: Literal["ALL", "STEP"] | None = None
    for key in ("pooling_type", "seq_pooling_type", "tok_pooling_type"):
        value = keys.get(key)
        if value is None:
            continue
        name = str(value).upper()
        if name in _TYPES and key != "tok_pooling_type":
            modes = (_TYPES[name],)
        elif name in _TOKEN_TYPES and key != "seq_pooling_type":
            tokens = _TOKEN_TYPES[name]
        else:
            raise _wrong(f"{key} is {value!r}: served are {', '.join((*_TYPES, *_TOKEN_TYPES, _SPLADE))}.")
    return modes, tokens


def _wrong(why: str) -> ConfigError:
    return ConfigError(
        f"--pooler-config {why}" if why.startswith("has ") else f"--pooler-config: {why}", param="pooler_config"
    )


def _flag(keys: Mapping[str, Any], key: str, default: bool | None) -> bool | None:
    value = keys.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise _wrong(f"{key} must be true or false.")
    return value


def _natural(keys: Mapping[str, Any], key: str) -> int | None:
    value = keys.get(key)
    if value is not None and not is_natural(value):
        raise _wrong(f"{key} must be a whole number.")
    return value


def _number(keys: Mapping[str, Any], key: str, default: float) -> float:
    value = keys.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong(f"{key} must be a number.")
    return float(value)


def is_natural(value: object) -> bool:
    """Whether a value is a whole number of at least 0."""
    return type(value) is int and 0 <= value < 2**31
