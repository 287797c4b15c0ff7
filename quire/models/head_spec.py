"""Reads what a draft head's config.json and files say in addition to a model's. Does not import torch.

Published EAGLE-3 heads (SafeAILab, SpecForge, vLLM) agree on the weights. They name the residual streams of the target
model that they read in two different ways, or not at all.
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
"""Flags of newer heads that change the arithmetic and are refused."""
_NESTED_ONLY: dict[str, object] = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
}
"""Keys of `eagle_config` that are served only if they are missing or have these values."""


@dataclass(frozen=True)
class HeadSpec:
    """A draft head, which proposes tokens for a target model.

    Attributes:
        vocab_size: Number of tokens that the head knows and can propose.
        target_hidden: Width of the target model's residual stream.
        sources: The residual streams that the head reads, each by the layer that it enters; None: the usual ones.
        norm_before_residual: Whether the head's own stream begins with the normed state.
        own_embedding: Whether the head's files have embeddings; otherwise, it uses the target model's.
        maps_tokens: Whether the head's files map its tokens to the target model's.
    """

    vocab_size: int
    target_hidden: int
    sources: tuple[int, ...] | None
    norm_before_residual: bool
    own_embedding: bool
    maps_tokens: bool

    def weights(self, vocab_size: int, hidden: int) -> int:
        """Return the number of weights around the head's layer, beside the last norm's."""
        fusion = len(self.sources_of(0)) * self.target_hidden * hidden
        return vocab_size * hidden * self.own_embedding + self.vocab_size * hidden + fusion

    def sources_of(self, layers: int) -> tuple[int, ...]:
        """Return the streams that the head reads of a model with `layers` layers.

        A small model may lack some of them, which `fits` finds out.
        """
        return (2, layers // 2, layers - 3) if self.sources is None else self.sources

    def fits(self, layers: int) -> bool:
        """Whether a model with `layers` layers has all streams that the head reads; the last stream leaves its last
        layer.
        """
        return all(0 <= source <= layers for source in self.sources_of(layers))


def read_head(fields: ConfigFile, directory: Path, hidden: int) -> HeadSpec:
    """Read a draft head that is `hidden` wide.

    Raises:
        CheckpointError: The file asks for something that is not served; the message names it.
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
    """Read the numbers of the streams: vLLM's key names the layers that they enter, SGLang's the layers that they
    leave.
    """
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
