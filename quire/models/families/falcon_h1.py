"""Falcon-H1: attention beside selective state spaces, and factors of projections (Yang et al. 2022, μP)."""

from __future__ import annotations

from dataclasses import fields as fields_of
from dataclasses import replace
from typing import TYPE_CHECKING

from quire.models.config_file import ConfigFile
from quire.models.families.family import Family
from quire.models.families.hybrids import STATE_SPACE, STATE_SPACE_MODULES, read_mamba2
from quire.models.layer_spec import AttentionSpec, HybridSpec, LayerSpec, with_parts

if TYPE_CHECKING:
    from quire.models.spec import ModelSpec


def _factors(fields: ConfigFile, key: str, number: int) -> tuple[float, ...]:
    """Read a list of factors, which are 1 by default."""
    values = fields.get(key, [1.0] * number)
    if not isinstance(values, list) or len(values) != number:
        raise fields.wrong(key, f"must be a list of {number} numbers")
    return tuple(fields.positive(key, value) for value in values)


def _layer(fields: ConfigFile, layer: LayerSpec, number: int) -> LayerSpec:
    own = layer.mixer
    assert isinstance(own, AttentionSpec)
    inner = fields.count("mamba_d_ssm") if fields.get("mamba_d_ssm") is not None else None
    before = fields.number("ssm_in_multiplier", 1.0)
    beside = replace(
        read_mamba2(fields, own.outputs, layer.norms.eps, inner),
        norm=fields.flag("mamba_rms_norm"),
        norm_first=fields.flag("mamba_norm_before_gate", True),
        factors=tuple(before * each for each in _factors(fields, "ssm_multipliers", 5)),
        out_factor=fields.number("ssm_out_multiplier", 1.0),
    )
    read, out = fields.number("attention_in_multiplier", 1.0), fields.number("attention_out_multiplier", 1.0)
    factors = read, read * fields.number("key_multiplier", 1.0), read * out
    same = {each.name: getattr(own, each.name) for each in fields_of(own)}
    layer = with_parts(layer, mlp={"factors": _factors(fields, "mlp_multipliers", 2)})
    return replace(layer, mixer=HybridSpec(**same, beside=beside, factors=factors))


def _model(fields: ConfigFile, spec: ModelSpec) -> ModelSpec:
    scale = fields.number("embedding_multiplier", 1.0)
    return replace(spec, embedding_scale=scale, logit_scale=fields.number("lm_head_multiplier", 1.0))


FAMILIES: dict[str, Family] = {
    "FalconH1ForCausalLM": Family(
        windows="chunks",
        defaults={
            **STATE_SPACE,
            "mamba_d_ssm": 1024,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 8192,
        },
        only={
            "attention_bias": (False,),
            "mlp_bias": (False,),
            "mamba_proj_bias": (False,),
            "projectors_bias": (False,),
        },
        modules=STATE_SPACE_MODULES,
        activations=("silu",),
        read_layer=_layer,
        read_model=_model,
    ),
}
