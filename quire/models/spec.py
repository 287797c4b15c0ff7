"""What a model is: a Hugging Face config.json, of either generation of transformers, read into frozen plain data.

Everything that would change the arithmetic and is not served is refused here, by name. Imports no torch, so that the
processes without a device read it as well; knows nothing about weights, tokenizers or memory.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.errors import CheckpointError
from quire.models.registry import ARCHITECTURES

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes an element, by the dtype names of config.json."""
ACTIVATIONS = ("silu",)
ROPE_TYPES = ("default", "llama3")
_ABSENT = object()


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's stretch of the low rotary frequencies (`rope_type` llama3)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_len: int


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding: frequencies theta^(-2i/d), then scaled."""

    theta: float = 10000.0
    scaling: Llama3Scaling | None = None


@dataclass(frozen=True)
class KVGroup:
    """Layers that share one block table."""

    layers: tuple[int, ...]
    window: int | None = None
    """Tokens that a token sees, itself included; None: all before it."""


@dataclass(frozen=True)
class ModelSpec:
    """A decoder's shape and flags.

    Attributes:
        architecture: A key of ARCHITECTURES.
        head_dim: Width of one head; `heads * head_dim` may differ from `hidden`.
        qkv_bias, out_bias, mlp_bias: Which projections have a bias.
        dtype: Name of the checkpoint's dtype, as config.json says it.
        max_model_len: Longest sequence that the model was made for, in tokens.
        eos_ids: End-of-sequence tokens of config.json (generation_config.json may name others).
    """

    architecture: str
    vocab_size: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    activation: str
    norm_eps: float
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    tie_embeddings: bool
    dtype: str
    max_model_len: int
    bos_id: int | None
    eos_ids: tuple[int, ...]
    rope: RopeSpec

    @property
    def num_parameters(self) -> int:
        """Number of weights; a tied embedding counts once."""
        q, kv, h = self.heads * self.head_dim, self.kv_heads * self.head_dim, self.hidden
        attention = h * (q + 2 * kv) + q * h + self.qkv_bias * (q + 2 * kv) + self.out_bias * h
        mlp = 3 * h * self.intermediate + self.mlp_bias * (2 * self.intermediate + h)
        embeddings = self.vocab_size * h * (1 if self.tie_embeddings else 2)
        return self.layers * (attention + mlp + 2 * h) + embeddings + h

    def weight_bytes(self, dtype: str) -> int:
        """Bytes of all weights held in `dtype`."""
        return self.num_parameters * DTYPE_BYTES[dtype]

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Bytes of keys and values that one token takes over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * DTYPE_BYTES[dtype]

    def kv_groups(self) -> tuple[KVGroup, ...]:
        """The layers by block table."""
        return (KVGroup(tuple(range(self.layers))),)


def read_spec(directory: Path | str) -> ModelSpec:
    """Read `directory`/config.json.

    Raises:
        CheckpointError: The file is missing or broken, or asks for something that is not served; it names what.
    """
    fields = _Fields(Path(directory) / "config.json")
    architecture = _architecture(fields)
    _refuse_what_changes_the_arithmetic(fields)
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    attention_bias = fields.flag("attention_bias")
    spec = ModelSpec(
        architecture=architecture,
        vocab_size=fields.count("vocab_size"),
        hidden=hidden,
        intermediate=fields.count("intermediate_size"),
        layers=fields.count("num_hidden_layers"),
        heads=heads,
        kv_heads=fields.count("num_key_value_heads", heads),
        head_dim=fields.count("head_dim", max(1, hidden // heads)),
        activation=fields.choice("hidden_act", ACTIVATIONS, "silu"),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias"),
        tie_embeddings=fields.flag("tie_word_embeddings"),
        dtype=_dtype(fields),
        max_model_len=fields.count("max_position_embeddings", 2048),
        bos_id=next(iter(fields.token_ids("bos_token_id")), None),
        eos_ids=fields.token_ids("eos_token_id"),
        rope=_rope(fields),
    )
    if spec.heads % spec.kv_heads:
        raise fields.wrong("num_key_value_heads", f"must divide num_attention_heads ({spec.heads})")
    if spec.head_dim % 2:
        raise fields.wrong("head_dim", "must be even")
    return spec


class _Fields:
    """The keys of one config.json, checked as they are read."""

    def __init__(self, file: Path) -> None:
        self.file = file
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointError(
                f"{file.parent} has no config.json: give --model a directory in Hugging Face layout, or a hub id."
            ) from None
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{file} cannot be read as JSON ({error}): download it again.") from None
        if not isinstance(values, dict):
            raise CheckpointError(f"{file} holds no JSON object: download it again.")
        self.values: dict[str, Any] = values

    def wrong(self, key: str, reason: str) -> CheckpointError:
        return CheckpointError(f"{self.file}: '{key}' is {self.values.get(key)!r}, it {reason}.", param=key)

    def get(self, key: str, default: Any = None) -> Any:
        value = self.values.get(key)
        return default if value is None else value

    def count(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
            raise self.wrong(key, "must be a positive integer")
        return value

    def number(self, key: str, default: float) -> float:
        return _positive(self, key, self.get(key, default))

    def flag(self, key: str) -> bool:
        value = self.get(key, False)
        if not isinstance(value, bool):
            raise self.wrong(key, "must be true or false")
        return value

    def choice(self, key: str, choices: tuple[str, ...], default: str) -> str:
        value = self.get(key, default)
        if value not in choices:
            raise self.wrong(key, f"is not supported: served are {', '.join(choices)}")
        return str(value)

    def token_ids(self, key: str) -> tuple[int, ...]:
        value = self.get(key, [])
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise self.wrong(key, "must be a token id or a list of them")
        return tuple(ids)


def _architecture(fields: _Fields) -> str:
    names = fields.get("architectures", [])
    for name in names if isinstance(names, list) else []:
        if name in ARCHITECTURES:
            return str(name)
    raise fields.wrong("architectures", f"is not supported: served are {', '.join(ARCHITECTURES)}")


def _refuse_what_changes_the_arithmetic(fields: _Fields) -> None:
    """Keys that a Llama config may carry and that this engine would have to compute with, unless at these values."""
    if fields.get("quantization_config"):
        method = fields.values["quantization_config"]
        name = method.get("quant_method", "unknown") if isinstance(method, dict) else method
        raise CheckpointError(
            f"{fields.file}: 'quantization_config' (method {name}) is not supported yet: use the model's bf16 or fp32 "
            "checkpoint.",
            param="quantization_config",
        )
    if fields.get("sliding_window") and fields.get("use_sliding_window", True):
        raise fields.wrong("sliding_window", "is not supported yet: only full attention is served")
    kinds = fields.get("layer_types", [])
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise fields.wrong("layer_types", "is not supported yet: only full_attention layers are served")
    if fields.get("partial_rotary_factor", 1.0) != 1.0:
        raise fields.wrong("partial_rotary_factor", "is not supported yet: only 1.0 is served")


def _dtype(fields: _Fields) -> str:
    key = "dtype" if fields.get("dtype") is not None else "torch_dtype"
    if isinstance(fields.get(key), str):
        fields.values[key] = fields.values[key].removeprefix("torch.")
    return fields.choice(key, tuple(DTYPE_BYTES), "float32")


def _rope(fields: _Fields) -> RopeSpec:
    """`rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (4, whose older files say `type`)."""
    key = "rope_parameters" if fields.get("rope_parameters") is not None else "rope_scaling"
    values = fields.get(key, {})
    if not isinstance(values, dict):
        raise fields.wrong(key, "must be an object")
    theta = _positive(fields, "rope_theta", values.get("rope_theta", fields.get("rope_theta", 10000.0)))
    kind = values.get("rope_type", values.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise fields.wrong(key, f"has type {kind!r}, which is not supported yet: served are {', '.join(ROPE_TYPES)}")
    if values.get("partial_rotary_factor", 1.0) != 1.0:
        raise fields.wrong(key, "has a partial_rotary_factor, which is not supported yet")
    if kind == "default":
        return RopeSpec(theta)
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    factor, low, high, length = (_positive(fields, key, values.get(name, _ABSENT), name) for name in names)
    if high <= low:
        raise fields.wrong(key, "must have high_freq_factor above low_freq_factor")
    return RopeSpec(theta, Llama3Scaling(factor, low, high, int(length)))


def _positive(fields: _Fields, key: str, value: Any, inner: str | None = None) -> float:
    """`value`, of `key` or of its entry `inner`, as a positive finite float."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise fields.wrong(key, f"must have a positive number as {inner}" if inner else "must be a positive number")
    return float(value)
