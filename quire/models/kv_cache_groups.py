"""Finds which layers have a sliding window, and divides layers into KV cache groups. Does not import torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from quire.errors import ConfigError
from quire.models.config_file import ConfigFile
from quire.models.families.family import Family
from quire.models.layer_spec import Mixer
from quire.scheduling.kvcache.cache_groups import CacheForm, CacheGroup, Reach

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


def kv_groups(mixers: Sequence[Mixer]) -> tuple[CacheGroup, ...]:
    """Divide layers into groups of equal reach and form, so that one pool of blocks serves all.

    A block has equally many bytes for each group, so groups of layers that cache more have fewer layers. Where all
    layers cache equally much, groups are as large as the rarest kind of layer. The last group of a kind may be smaller,
    and wastes the rest. If attention is two-sided, layers of one kind write over one another's keys and values, and are
    one group. Layers that cache nothing of tokens, or read another layer's cache, are in no group; if all are such,
    there are no groups.
    """
    kinds: dict[tuple[Reach, CacheForm], list[int]] = {}
    for layer, mixer in enumerate(mixers):
        if mixer.form.planes:
            kinds.setdefault((mixer.reach, mixer.form), []).append(layer)
    number = sum(map(len, kinds.values()))
    if not kinds:
        return ()
    if mixers[0].two_sided:
        sizes = dict.fromkeys(kinds, number)
    elif len({form.elements for _, form in kinds}) == 1:
        sizes = dict.fromkeys(kinds, max(min(map(len, kinds.values())), -(-number // MAX_GROUPS)))
    else:
        sizes = _sizes({kind: len(layers) for kind, layers in kinds.items()})
    return tuple(
        CacheGroup(tuple(layers[first : first + size]), reach, form)
        for ((reach, form), layers), size in zip(kinds.items(), sizes.values(), strict=True)
        for first in range(0, len(layers), size)
    )


def _sizes(layers: Mapping[tuple[Reach, CacheForm], int]) -> dict[tuple[Reach, CacheForm], int]:
    """Return how many layers a group of each kind has, if layers cache different amounts.

    Of all sizes of a block that every kind's layers divide into equal parts, take the one that wastes least in layers
    that see everything, since these hold most blocks, then the one that wastes least at all, then the largest.
    """
    if len({tuple(plane.elements / form.elements for plane in form.planes) for _, form in layers}) > 1:
        raise ConfigError("Layers whose keys and values differ in their proportions have no common KV cache.")
    unit = math.lcm(*(form.elements for _, form in layers))
    most = max(number * form.elements for (_, form), number in layers.items())

    def cost(block: int) -> tuple[bool, int, int, int]:
        groups, wasted, of_full = 0, 0, 0
        for (reach, form), number in layers.items():
            parts = block // form.elements
            own = -(-number // parts)
            groups, wasted = groups + own, wasted + own * block - number * form.elements
            of_full += own * block - number * form.elements if reach.length is None else 0
        return groups > MAX_GROUPS, of_full, wasted, groups

    block = min(range(unit, most + unit, unit), key=cost)
    return {kind: block // kind[1].elements for kind in layers}


def _kinds(fields: ConfigFile, layers: int) -> tuple[bool, ...] | None:
    """Return for each layer whether `layer_types` gives it a window; None: `layer_types` is missing."""
    kinds = fields.get("layer_types")
    if kinds is None:
        return None
    if isinstance(kinds, list) and len(kinds) == layers + fields.natural("num_nextn_predict_layers", 0):
        kinds = kinds[:layers]  # others are of layers that predict further tokens
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
    letters = fields.get("sliding_window_pattern")  # EXAONE 4's LLLG: local layers, and a global one
    if isinstance(letters, str) and letters and set(letters) <= {"L", "G"}:
        return tuple(letters[layer % len(letters)] == "L" for layer in range(layers))
    pattern = fields.count("sliding_window_pattern")
    return tuple((layer + 1) % pattern != 0 for layer in range(layers))
