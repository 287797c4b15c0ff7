"""The draft model that the settings name: where it is, whether it fits the model, and what it takes of memory."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from quire import builtin
from quire.config import Config, SpeculationConfig
from quire.errors import ConfigError
from quire.models.spec import ModelSpec, read_spec
from quire.planning.footprint import gpu_activation_bytes
from quire.planning.step_limits import StepLimits
from quire.weights import hub

DRAFT_TOKENS_A_STEP = 256
"""Tokens that the draft model is behind by are computed in a step up to this number, of all sequences together; those
that are still behind have no drafts in it."""


def with_draft_model(config: Config, spec: ModelSpec, directory: Path) -> Config:
    """The settings with the draft model's directory in place of its name.

    Args:
        config: Any.
        spec: Of the model that verifies.
        directory: Of its files.

    Raises:
        ModelNotFoundError, CheckpointError: There is no such model, or its config cannot be read.
        ConfigError: Its tokens are others, or it cannot follow the model.
    """
    speculation = config.speculation.speculation
    if speculation is None or speculation.method != "draft_model":
        return config
    name = speculation.model
    found = builtin.path(name) if name in builtin.MODELS else _download(config, name)
    draft = read_spec(str(found))
    if draft.vocab_size != spec.vocab_size or not _same_tokens(found, directory):
        raise _error(f"The draft model {name} has other tokens than the model: give one with the same tokenizer.")
    if draft.rope_length_mode is not None or any(group.window is not None for group in draft.kv_groups()):
        raise _error(f"The draft model {name} has sliding windows or a RoPE by length, which is not supported yet.")
    asked = {"method": "draft_model", "model": str(found), "num_speculative_tokens": speculation.tokens}
    return replace(config, speculation=SpeculationConfig(asked))


class DraftBytes(NamedTuple):
    """What a draft model takes of memory.

    Attributes:
        weights: Of it.
        block: Of a KV block, beside the model's own.
    """

    weights: int = 0
    block: int = 0


def draft_bytes(config: Config) -> DraftBytes:
    """Of the draft model that resolved settings name; none: nothing."""
    speculation, dtype = config.speculation.speculation, config.model.dtype
    if speculation is None or speculation.method != "draft_model":
        return DraftBytes()
    draft = read_spec(speculation.model)
    return DraftBytes(draft.weight_bytes(dtype), draft.kv_block_bytes(dtype, config.cache.block_size))


def draft_model_bytes(config: Config) -> int:
    """What the draft model takes of a GPU beside its KV cache: weights and its largest step. An estimate."""
    speculation, limits = config.speculation.speculation, StepLimits.of(config)
    if speculation is None or speculation.method != "draft_model":
        return 0
    draft, dtype = read_spec(speculation.model), config.model.dtype
    steps = StepLimits(limits.rows, max(DRAFT_TOKENS_A_STEP, limits.rows), limits.length)
    return draft.weight_bytes(dtype) + gpu_activation_bytes(draft, dtype, config.cache.block_size, steps)


def _download(config: Config, name: str) -> Path:
    return hub.resolve(name, None, config.model.hf_token, config.load.download_dir)


def _same_tokens(first: Path, second: Path) -> bool:
    """Whether both have the same ids for the same texts, as far as tokenizer.json says so."""
    files = [directory / "tokenizer.json" for directory in (first, second)]
    if not all(file.is_file() for file in files):
        return True
    texts = [file.read_bytes() for file in files]
    return texts[0] == texts[1] or _tokens(texts[0]) == _tokens(texts[1])


def _tokens(text: bytes) -> dict[str, Any]:
    found = json.loads(text)
    added = {token["content"]: token["id"] for token in found.get("added_tokens", ())}
    vocabulary = found.get("model", {}).get("vocab", {})
    return {**vocabulary, **added} if isinstance(vocabulary, dict) else {"vocab": vocabulary, **added}


def _error(text: str) -> ConfigError:
    return ConfigError(text, param="speculative_config")
