"""Finds which layers have a sliding window, and divides layers into KV cache groups. Does not import torch."""

from __future__ import annotations

from collections.abc import Sequence

from quire.models.config_file import ConfigFile
from quire.models.families.family import Family
from quire.models.layer_spec import AttentionSpec
from quire.scheduling.kvcache.cache_groups import KVCacheGroup

MAX_GROUPS = 16
"""With more groups than this, their block tables cost the host more than larger groups waste."""
_KINDS = {"full_attention": False, "sliding_attention": True}


def read_window(fields: ConfigFile) -> int | None:
    """Return how many tokens a token sees, itself included, in layers with a window; None: no layer has a window."""
    asked = fields.get("sliding_window") is not None and fields.flag("use_sliding_window", True)
    return fields.count("sliding_window") if asked else None


def read_windowed_layers(fields: ConfigFile, family: Family, layers: int) -> tuple[bool, ...]:
    """Return for each layer whether it has a window.

    Raises:
        CheckpointError: The file asks for windows that the architecture does not serve.
    """
    if family.windows == "chunks":
        return (False,) * layers
    asked = read_window(fields) is not None
    kinds = _kinds(fields, layers)
    if family.windows == "none":
        if asked:
            raise fields.wrong("sliding_window", "is not supported: this architecture has full attention")
        kinds = kinds or (False,) * layers
    elif family.windows == "all":
        kinds = kinds or (asked,) * layers
    elif kinds is None:
        kinds = _usual_kinds(fields, family, layers, asked)
    if family.windows in ("none", "all") and any(kind != (asked and family.windows == "all") for kind in kinds):
        raise fields.wrong("layer_types", "is not supported: this architecture's layers are all of one kind")
    return kinds


def kv_groups(mixers: Sequence[AttentionSpec]) -> tuple[KVCacheGroup, ...]:
    """Divide layers into groups of equal windows or chunks and equal size, so that one pool of blocks serves all.

    Groups are as large as the rarest kind of layer. The last group of a kind may be smaller, and wastes the rest.
    """
    kinds: dict[tuple[int | None, int | None], list[int]] = {}
    for layer, mixer in enumerate(mixers):
        kinds.setdefault((mixer.window, mixer.chunk), []).append(layer)
    size = max(min(map(len, kinds.values())), -(-len(mixers) // MAX_GROUPS))
    return tuple(
        KVCacheGroup(tuple(layers[first : first + size]), window, chunk)
        for (window, chunk), layers in kinds.items()
        for first in range(0, len(layers), size)
    )


def _kinds(fields: ConfigFile, layers: int) -> tuple[bool, ...] | None:
    """Return for each layer whether `layer_types` gives it a window; None: `layer_types` is missing."""
    kinds = fields.get("layer_types")
    if kinds is None:
        return None
    if (
        not isinstance(kinds, list)
        or len(kinds) != layers
        or not all(isinstance(k, str) and k in _KINDS for k in kinds)
    ):
        raise fields.wrong("layer_types", f"is not supported: served are {layers} entries of {', '.join(_KINDS)}")
    return tuple(_KINDS[kind] for kind in kinds)


def _usual_kinds(fields: ConfigFile, family: Family, layers: int, asked: bool) -> tuple[bool, ...]:
    """Return for each layer whether the architecture gives it a window if `layer_types` is missing."""
    if family.windows == "from":
        first = fields.count("max_window_layers") if fields.get("max_window_layers") else 0
        return tuple(asked and layer >= first for layer in range(layers))
    pattern = fields.count("sliding_window_pattern")
    return tuple((layer + 1) % pattern != 0 for layer in range(layers))
