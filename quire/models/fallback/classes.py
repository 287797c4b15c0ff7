"""Finds transformers' class for a checkpoint, and builds it on the meta device, without weights."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)
from transformers.utils.generic import ContextManagers

from quire.errors import CheckpointError

EAGER = "eager"
"""transformers' name of attention as each model's own file computes it."""
EXPERTS = "grouped_mm"
"""transformers' name of how experts compute by default."""

TextHeadKind = Literal["", "text", "tokens"]
"""What a model's head makes values of: nothing, if there is no head; texts; or each token."""


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


def find_class(config: Any, names: list[str]) -> type[PreTrainedModel] | None:
    """Return the class of a causal language model that config.json's `architectures` name, or of one that reads images
    as well; None: they name none."""
    texts, images = map(_classes_of, (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES))
    name = next((name for name in names if name in texts | images), None)
    found: type[PreTrainedModel] | None = None if name is None else getattr(transformers, name)
    sees = found is not None and not config.is_encoder_decoder and sees_images(found)
    return found if name in texts or sees else None


def sees_images(kind: type[PreTrainedModel]) -> bool:
    """Whether a class, or the one that it puts a head on, computes vectors of images (`get_image_features`)."""
    if hasattr(kind, "get_image_features"):
        return True
    stem, others = kind.__name__.partition("For")[0], vars(sys.modules[kind.__module__])
    return hasattr(others.get(f"{stem}Model"), "get_image_features")


def find_whole_class(config: Any, names: list[str]) -> tuple[type[PreTrainedModel], TextHeadKind]:
    """Return the class of a model that makes vectors or values of texts, and what its head makes values of.

    Of a model with an encoder and a decoder, the encoder is taken.

    Raises:
        CheckpointError: None of `architectures` is one of transformers.
    """
    encoders = _classes_of(MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES)
    heads: tuple[tuple[TextHeadKind, frozenset[str]], ...] = (
        ("", _classes_of(MODEL_MAPPING_NAMES) | encoders),
        ("text", _classes_of(MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES)),
        ("tokens", _classes_of(MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES)),
    )
    for name in names:
        for head, classes in heads:
            if name in classes:
                encoder = MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES.get(config.model_type)
                is_half = not head and bool(config.is_encoder_decoder) and encoder is not None
                return getattr(transformers, str(encoder) if is_half else name), head
    raise CheckpointError(
        f"'architectures' is {names!r}: neither Quire nor transformers {transformers.__version__} has it as a causal "
        f"language model, an encoder or a classifier (model_type {config.model_type!r}): give another model."
    )


def build_whole(config: Any, names: list[str], dtype: torch.dtype) -> tuple[PreTrainedModel, TextHeadKind]:
    """Build the model that `find_whole_class` finds, without memory, and without a pooler that embeddings do without.

    Raises:
        CheckpointError: From `find_whole_class`, or transformers cannot build it.
    """
    kind, head = find_whole_class(config, names)
    without = {"add_pooling_layer": False} if "add_pooling_layer" in inspect.signature(kind).parameters else {}
    return build_on_meta(kind, config, dtype, **without), head


def build_on_meta(kind: type[PreTrainedModel], config: Any, dtype: torch.dtype, **options: bool) -> PreTrainedModel:
    """Build a model without memory, whose attention is its own until it is changed.

    Args:
        options: Further arguments of the class.

    Raises:
        CheckpointError: transformers cannot build it.
    """
    if kind.config_class is not None and not isinstance(config, kind.config_class) and not sees_images(kind):
        config = text_config_of(config)
    config._attn_implementation = EAGER
    try:
        with ContextManagers(kind.get_init_context(dtype, False, False, None)):
            model: PreTrainedModel = kind(config, **options)
    except Exception as error:
        raise CheckpointError(f"transformers cannot build {kind.__name__}: {_first_line(error)}") from error
    for module in model.modules():
        if isinstance(module, PreTrainedModel):  # it reads values of tokens, for a warning about padding
            module.__dict__["warn_if_padding_and_no_attention_mask"] = _nothing
    model.eval()  # type: ignore[no-untyped-call]
    return model


def build_text_on_meta(kind: type[PreTrainedModel], config: Any, dtype: torch.dtype) -> PreTrainedModel:
    """Build a model that generates text as `build_on_meta` does, without the modules that read something else."""
    model = build_on_meta(kind, config, dtype)
    if sees_images(kind):
        text: Any = model.get_decoder()  # type: ignore[no-untyped-call]
        for name, child in list(model.base_model.named_children()):
            if not any(module is text for module in child.modules()) and text is not model.base_model:
                setattr(model.base_model, name, nn.Identity())
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


def _classes_of(mapping: Mapping[str, Any]) -> frozenset[str]:
    return frozenset(name for names in mapping.values() for name in _as_names(names))


def _as_names(names: Any) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
