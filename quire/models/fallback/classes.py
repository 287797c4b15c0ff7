"""Finds transformers' class for a checkpoint, and builds it on the meta device, without weights."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.generic import ContextManagers

from quire.errors import CheckpointError

EAGER = "eager"
"""transformers' name of attention as each model's own file computes it."""
EXPERTS = "grouped_mm"
"""transformers' name of how experts compute by default."""


def read_config(directory: Path) -> Any:
    """Return transformers' config object of a checkpoint. No code from the checkpoint is run.

    Raises:
        CheckpointError: This transformers has no such model, or the file does not fit it.
    """
    values = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    kind = values.get("model_type")
    if kind not in transformers.CONFIG_MAPPING:
        if values.get("auto_map"):
            raise CheckpointError(
                f"{directory}: model_type {kind!r} needs remote code (auto_map in config.json), which is never run, "
                "and transformers has no class of its own for it: give another model."
            )
        raise CheckpointError(
            f"{directory}: transformers {transformers.__version__} has no model_type {kind!r}: install a newer "
            "transformers, or give another model."
        )
    try:
        return AutoConfig.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # transformers checks with errors of many kinds
        raise CheckpointError(f"{directory / 'config.json'}: transformers refuses it: {_first_line(error)}") from error


def find_class(config: Any, names: list[str]) -> type[PreTrainedModel]:
    """Return the class of a causal language model that config.json's `architectures` name.

    Raises:
        CheckpointError: None of them is a causal language model of transformers.
    """
    causal = {name for names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() for name in _as_names(names)}
    for name in names:
        if name in causal:
            found: type[PreTrainedModel] = getattr(transformers, name)
            return found
    raise CheckpointError(
        f"'architectures' is {names!r}: neither Quire nor transformers {transformers.__version__} has it as a causal "
        f"language model (model_type {config.model_type!r}): give a model that generates text."
    )


def build_on_meta(kind: type[PreTrainedModel], config: Any, dtype: torch.dtype) -> PreTrainedModel:
    """Build a model without memory, whose attention is its own until it is changed.

    Raises:
        CheckpointError: transformers cannot build it.
    """
    if kind.config_class is not None and not isinstance(config, kind.config_class):
        config = text_config_of(config)
    config._attn_implementation = EAGER
    try:
        with ContextManagers(kind.get_init_context(dtype, False, False, None)):
            model: PreTrainedModel = kind(config)
    except Exception as error:
        raise CheckpointError(f"transformers cannot build {kind.__name__}: {_first_line(error)}") from error
    for module in model.modules():
        if isinstance(module, PreTrainedModel):  # it reads values of tokens, for a warning about padding
            module.__dict__["warn_if_padding_and_no_attention_mask"] = _nothing
    model.eval()  # type: ignore[no-untyped-call]
    return model


def set_attention(model: PreTrainedModel, name: str) -> None:
    """Let every module of the model use this attention function from now on."""
    for config in _configs_of(model):
        config._attn_implementation = name


def set_experts(model: PreTrainedModel, name: str) -> None:
    """Let all experts of the model compute in this way from now on."""
    for config in _configs_of(model):
        config._experts_implementation = name


def base_of(model: PreTrainedModel) -> nn.Module | None:
    """Return the decoder below the head; None if the model is one module."""
    base: nn.Module | None = model.base_model
    if base is model:
        base = _inner(model)
    while base is not None and "input_ids" not in arguments_of(base):  # it only wraps another
        base = _inner(base)
    return base


def arguments_of(module: nn.Module) -> frozenset[str]:
    """Return the names of the arguments that a module's forward names."""
    return frozenset(inspect.signature(module.forward).parameters)


def text_config_of(config: Any) -> Any:
    """Return the part of a config that describes the text decoder."""
    return config.get_text_config(decoder=True)


def _inner(module: nn.Module) -> nn.Module | None:
    return next((child for child in module.children() if isinstance(child, PreTrainedModel)), None)


def _configs_of(model: PreTrainedModel) -> Iterator[Any]:
    """Yield the configs of all modules, each once."""
    seen: set[int] = set()
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig) and id(config) not in seen:
            seen.add(id(config))
            yield config


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _as_names(names: Any) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
