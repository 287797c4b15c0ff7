"""Reads rotary position embedding from config.json, as transformers 4 or 5 writes it. Does not import torch.

`rope.py` computes each kind of scaling.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire.models.config_file import ConfigFile
from quire.scheduling.kvcache.rope_length_mode import RopeLengthMode

if TYPE_CHECKING:
    from quire.models.families.family import Family

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope", "factors", "proportional")
_ABSENT = object()
_BY_LAYER = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class LinearScaling:
    """Divides every frequency by the factor."""

    factor: float


@dataclass(frozen=True)
class DynamicScaling:
    """Grows the base with the sequence beyond the original length ("dynamic" NTK scaling)."""

    factor: float
    original_max_len: int


@dataclass(frozen=True)
class YarnScaling:
    """Divides slow frequencies by the factor, keeps fast ones, and blends between; `attention_factor` scales the
    angles.
    """

    factor: float
    original_max_len: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's stretch of the low rotary frequencies (`rope_type` llama3)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_len: int


@dataclass(frozen=True)
class LongScaling:
    """Divides each frequency by its own factor: from one list up to the original length, from another beyond it
    (`longrope`).
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_max_len: int
    attention_factor: float


@dataclass(frozen=True)
class FactorScaling:
    """Divides each frequency by its own factor, in which GGUF files store the result of another scaling (`factors`)."""

    factors: tuple[float, ...]


@dataclass(frozen=True)
class ProportionalScaling:
    """Keeps the fastest `share` of frequencies, divided by the factor; all others are 0 (`proportional`)."""

    share: float
    factor: float


Scaling = (
    LinearScaling | DynamicScaling | YarnScaling | Llama3Scaling | LongScaling | FactorScaling | ProportionalScaling
)


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding: frequencies theta^(-2i/d), then scaled, for the first `share` of each head's width.

    Pairs (2i, 2i + 1) are rotated if they are `interleaved`; otherwise, element i of the first half and of the second.
    A rotation may go `backward`. With `sections`, images give tokens three positions (M-RoPE, Wang et al. 2024,
    "Qwen2-VL", section 2.1): so many frequencies go by time, row and column, one section behind the other, or, where
    sections `alternate`, in turns while they last (Bai et al. 2025, "Qwen3-VL", section 2.1).
    """

    theta: float = 10000.0
    scaling: Scaling | None = None
    share: float = 1.0
    interleaved: bool = False
    backward: bool = False
    sections: tuple[int, ...] = ()
    alternate: bool = False

    @property
    def axes(self) -> tuple[int, ...]:
        """By what each frequency goes, of those with `sections`: 0 is time, 1 is row, 2 is column."""
        if not self.alternate:
            return tuple(axis for axis, count in enumerate(self.sections) for _ in range(count))
        return tuple(
            axis if number < len(self.sections) * self.sections[axis] else 0
            for number in range(sum(self.sections))
            for axis in (number % len(self.sections),)
        )

    def width(self, head_dim: int) -> int:
        """Return how many of a head's dimensions are rotated."""
        return int(head_dim * self.share)

    @property
    def length_mode(self) -> RopeLengthMode | None:
        """How the rotation depends on the sequence's length; None: it does not."""
        match self.scaling:
            case LongScaling():
                return RopeLengthMode(self.scaling.original_max_len, "longrope")
            case DynamicScaling():
                return RopeLengthMode(self.scaling.original_max_len, "dynamic")
            case _:
                return None

    def max_len(self, max_position_embeddings: int) -> int:
        """Return the longest sequence that the scaling was made for, in tokens."""
        match self.scaling:
            case LinearScaling(factor) | DynamicScaling(factor):
                return int(max_position_embeddings * factor)
            case YarnScaling(factor, original):
                return max(max_position_embeddings, int(original * factor))
            case _:
                return max_position_embeddings


def read_rope(fields: ConfigFile, family: Family, head_dim: int) -> RopeSpec:
    """Read the rotary embedding of layers without a window of their own.

    Reads `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (transformers 4; older files say
    `type`).
    """
    key = "rope_parameters" if fields.get("rope_parameters") is not None else "rope_scaling"
    values = _object(fields, key, fields.get(key, {}))
    if family.local_rope and key == "rope_parameters":
        values = _object(fields, key, values.get("full_attention") or {})
    elif any(kind in values for kind in _BY_LAYER):
        raise fields.wrong(key, "differs by layer, which this architecture does not")
    if isinstance(fields.get("rope_theta"), list):
        theta, share = _of_layers(fields, "full_attention")
        return _read(fields, family, key, {"partial_rotary_factor": share, **values}, theta, head_dim)
    return _read(fields, family, key, values, fields.get("rope_theta", 10000.0), head_dim)


def _of_layers(fields: ConfigFile, kind: str) -> tuple[object, object]:
    """Return the base of this kind's rotary embedding and its share of a head, which lists have for each layer."""
    kinds, found = fields.get("layer_types"), []
    at = kinds.index(kind) if isinstance(kinds, list) and kind in kinds else 0
    for key, usual in (("rope_theta", [10000.0]), ("partial_rotary_factors", [1.0])):
        values = fields.get(key, usual * (at + 1))
        if not isinstance(values, list) or len(values) <= at:
            raise fields.wrong(key, "must have a number for each layer")
        found.append(values[at])
    return found[0], found[1]


def read_local_rope(fields: ConfigFile, family: Family, head_dim: int) -> RopeSpec | None:
    """Read the rotary embedding that layers with a window have; None: they have the same as all others."""
    if not family.local_rope:
        return None
    key = "rope_parameters"
    values = _object(fields, key, _object(fields, key, fields.get(key, {})).get("sliding_attention") or {})
    theta = fields.get("rope_local_base_freq", 10000.0)
    if isinstance(fields.get("rope_theta"), list):
        theta, share = _of_layers(fields, "sliding_attention")
        values = {"partial_rotary_factor": share, **values}
    local = _read(fields, family, key, values, theta, head_dim)
    if local.length_mode is not None:
        raise fields.wrong(key, "has sliding_attention scaled by length, which is not supported")
    return local


def _read(
    fields: ConfigFile, family: Family, key: str, values: dict[str, Any], theta: object, head_dim: int
) -> RopeSpec:
    own = values.get("rope_theta")
    theta = fields.positive("rope_theta", theta if own is None else own)
    kind = values.get("rope_type", values.get("type", "default"))
    if kind in ("su", "yarn") and "long_factor" in values:  # what the first Phi-3 files called it
        kind = "longrope"
    if kind == "mrope" and "mrope_section" in values:  # what the first files of Qwen2-VL call it
        kind = "default"
    if kind not in ROPE_TYPES:
        raise fields.wrong(key, f"has type {kind!r}, which is not supported: served are {', '.join(ROPE_TYPES)}")
    if kind == "proportional":
        return RopeSpec(theta, _Scalings(fields, key, values, head_dim).read(kind))
    share = values.get("partial_rotary_factor", fields.get("partial_rotary_factor", 1.0))
    if fields.positive(key, share, "partial_rotary_factor") != 1.0 and not (family.partial_rotary and share < 1):
        raise fields.wrong("partial_rotary_factor", f"as {share} is not supported by this architecture")
    width = int(head_dim * share)
    scaling = None if kind == "default" else _Scalings(fields, key, values, width).read(kind)
    alternate = bool(values.get("mrope_interleaved", fields.get("mrope_interleaved", False)))
    return RopeSpec(theta, scaling, share, sections=_sections(fields, key, values, width), alternate=alternate)


def _sections(fields: ConfigFile, key: str, values: dict[str, Any], width: int) -> tuple[int, ...]:
    """Return the sections of M-RoPE; empty if there are none."""
    sections = values.get("mrope_section")
    if sections is None:
        return ()
    if not isinstance(sections, list) or not all(type(each) is int and each > 0 for each in sections):
        raise fields.wrong(key, "must have whole numbers as mrope_section")
    if len(sections) != 3 or 2 * sum(sections) != width:
        raise fields.wrong(key, f"must have an mrope_section of three numbers, {width // 2} together")
    return tuple(sections)


class _Scalings:
    """Reads the entries of one scaling; `width` dimensions of each head are rotated."""

    def __init__(self, fields: ConfigFile, key: str, values: dict[str, Any], width: int) -> None:
        self._fields = fields
        self._key = key
        self._values = values
        self._width = width

    def read(self, kind: str) -> Scaling:
        """Read the scaling of this `rope_type`."""
        reader: dict[str, Any] = {
            "linear": self._linear,
            "dynamic": self._dynamic,
            "yarn": self._yarn,
            "llama3": self._llama3,
            "longrope": self._long,
            "proportional": lambda: ProportionalScaling(
                self._number("partial_rotary_factor", 1.0), self._number("factor", 1.0)
            ),
            "factors": lambda: FactorScaling(self._factors("factors")),
        }
        scaling: Scaling = reader[kind]()
        return scaling

    def _linear(self) -> LinearScaling:
        return LinearScaling(self._number("factor"))

    def _dynamic(self) -> DynamicScaling:
        return DynamicScaling(self._number("factor"), self._fields.count("max_position_embeddings", 2048))

    def _yarn(self) -> YarnScaling:
        original = self._original()
        factor = self._number("factor", self._ratio(original))
        scale, all_dims = self._values.get("mscale"), self._values.get("mscale_all_dim")
        usual = yarn_scale(factor, 1.0)
        if scale and all_dims:
            usual = yarn_scale(factor, self._number("mscale")) / yarn_scale(factor, self._number("mscale_all_dim"))
        truncate = self._values.get("truncate", True)
        if not isinstance(truncate, bool):
            raise self._fields.wrong(self._key, "must have true or false as truncate")
        return YarnScaling(
            factor=factor,
            original_max_len=original,
            attention_factor=self._number("attention_factor", usual),
            beta_fast=self._number("beta_fast", 32.0),
            beta_slow=self._number("beta_slow", 1.0),
            truncate=truncate,
        )

    def _llama3(self) -> Llama3Scaling:
        names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        factor, low, high, length = (self._number(name) for name in names)
        if high < low:
            raise self._fields.wrong(self._key, "must have high_freq_factor of at least low_freq_factor")
        return Llama3Scaling(factor, low, high, int(length))

    def _long(self) -> LongScaling:
        original = self._original()
        factor = self._number("factor", self._ratio(original))
        usual = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
        return LongScaling(
            short_factors=self._factors("short_factor"),
            long_factors=self._factors("long_factor"),
            original_max_len=original,
            attention_factor=self._number("attention_factor", usual),
        )

    def _original(self) -> int:
        """Return the length that the model was first trained on. A value outside the rotary entries comes first."""
        name = "original_max_position_embeddings"
        if self._fields.get(name) is not None:
            return self._fields.count(name)
        usual = self._fields.count("max_position_embeddings", 2048)
        return int(self._number(name, usual))

    def _ratio(self, original: int) -> float:
        return self._fields.count("max_position_embeddings", 2048) / original

    def _factors(self, name: str) -> tuple[float, ...]:
        values = self._values.get(name)
        if not isinstance(values, list) or len(values) != self._width // 2:
            raise self._fields.wrong(self._key, f"must have {self._width // 2} numbers as {name}")
        return tuple(self._fields.positive(self._key, value, name) for value in values)

    def _number(self, name: str, default: object = _ABSENT) -> float:
        value = self._values.get(name)
        return self._fields.positive(self._key, default if value is None else value, name)


def yarn_scale(factor: float, scale: float) -> float:
    """Return the factor of angles that are stretched `factor` times, as Peng et al. 2023 (YaRN, eq. 22) have it and
    DeepSeek generalises it.
    """
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _object(fields: ConfigFile, key: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise fields.wrong(key, "must be an object")
    return value
