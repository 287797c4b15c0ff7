"""What a draft head's config.json and its files say beyond what a model's do. Imports no torch.

Published EAGLE-3 heads (SafeAILab, SpecForge, vLLM) agree on the weights; which residual streams of the model are read,
they say in two ways, or not at all.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.models.config_file import ConfigFile
from quire.models.weights.safetensors_files import read_headers

_SOURCES = "eagle_aux_hidden_state_layer_ids"
_NESTED = "eagle_config"
_REFUSED = ("norm_before_fc", "fc_norm", "norm_output")
"""Flags of newer heads, which change the arithmetic."""
_NESTED_ONLY: dict[str, object] = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
}
"""Keys of `eagle_config` that are served with these values alone, or with none."""


@dataclass(frozen=True)
class HeadSpec:
    """A head that proposes tokens for a model.

    Attributes:
        vocab_size: Tokens that it knows; the others of the model's it never proposes.
        target_hidden: Width of the model's residual stream.
        sources: Which streams it reads, by the layer that each enters; None: those that are usual.
        norm_before_residual: Its own stream begins with the normed state.
        own_embedding: Its files have embeddings; otherwise they are the model's.
        maps_tokens: Its files say which token of the model each of its own is.
    """

    vocab_size: int
    target_hidden: int
    sources: tuple[int, ...] | None
    norm_before_residual: bool
    own_embedding: bool
    maps_tokens: bool

    def sources_of(self, layers: int) -> tuple[int, ...]:
        """The streams of a model of so many layers; of a small one, some may be missing: see `fits`."""
        return (2, layers // 2, layers - 3) if self.sources is None else self.sources

    def fits(self, layers: int) -> bool:
        """Whether a model of so many layers has these streams; the last one is that behind its last layer."""
        return all(0 <= source <= layers for source in self.sources_of(layers))


def read_head(fields: ConfigFile, directory: Path, hidden: int) -> HeadSpec:
    """Of a head `hidden` wide.

    Raises:
        CheckpointError: The file asks for something that is not served; it names what.
    """
    for key in _REFUSED:
        if fields.flag(key):
            raise fields.wrong(key, "is not supported")
    if fields.count("num_hidden_layers", 1) != 1:
        raise fields.wrong("num_hidden_layers", "is not supported: a head has one layer")
    vocab_size = fields.count("vocab_size")
    own = fields.count("draft_vocab_size", vocab_size)
    if own > vocab_size:
        raise fields.wrong("draft_vocab_size", f"must be at most vocab_size ({vocab_size})")
    names = {name.removeprefix("model.") for name in read_headers(directory)}
    return HeadSpec(
        vocab_size=own,
        target_hidden=fields.count("target_hidden_size", hidden),
        sources=_sources(fields),
        norm_before_residual=fields.flag("norm_before_residual"),
        own_embedding="embed_tokens.weight" in names,
        maps_tokens=own < vocab_size or "d2t" in names,
    )


def _sources(fields: ConfigFile) -> tuple[int, ...] | None:
    """vLLM's key names the layers that the streams enter; SGLang's, in `eagle_config`, those that they come from."""
    nested = fields.get(_NESTED, {})
    if not isinstance(nested, dict):
        raise fields.wrong(_NESTED, "must be an object")
    for key, served in _NESTED_ONLY.items():
        if nested.get(key) is not None and nested[key] != served:
            raise fields.wrong(_NESTED, f"is not supported: {key} must be {json.dumps(served)}")
    if fields.get(_SOURCES) is not None:
        return _numbers(fields, _SOURCES, fields.get(_SOURCES), 0)
    if nested.get(_SOURCES):
        return _numbers(fields, _NESTED, nested[_SOURCES], 1)
    return None


def _numbers(fields: ConfigFile, key: str, value: Any, add: int) -> tuple[int, ...]:
    if not isinstance(value, list) or not value or not all(type(each) is int and each + add >= 0 for each in value):
        raise fields.wrong(key, f"must have a list of layer numbers as {_SOURCES}")
    return tuple(each + add for each in value)
