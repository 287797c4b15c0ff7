"""Mamba, FalconMamba, Mamba2: selective state spaces alone. Jamba: attention in some layers, and experts in others."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quire.models.config_file import ConfigFile
from quire.models.families.family import Family, ModuleNames
from quire.models.families.hybrids import STATE_SPACE_MODULES, read_own_mamba2
from quire.models.families.layers import in_turn
from quire.models.families.mixtures import experts_in_place_of_mlps
from quire.models.layer_spec import LayerSpec, MlpSpec, with_parts
from quire.models.state_space_spec import MambaSpec

if TYPE_CHECKING:
    from quire.models.spec import ModelSpec


def _mamba2(fields: ConfigFile, layer: LayerSpec, number: int) -> LayerSpec:
    h, eps = layer.mixer.outputs, layer.norms.eps
    mixer = read_own_mamba2(fields, h, eps, "num_heads", "head_dim", "state_size")
    if mixer.inner != fields.count("expand") * h:
        raise fields.wrong("expand", f"must be num_heads * head_dim ({mixer.inner}) / hidden_size ({h})")
    return LayerSpec(mixer, MlpSpec(h, 0), replace(layer.norms, number=1, place="alone"))


def _selective(fields: ConfigFile, layer: LayerSpec, number: int) -> LayerSpec:
    h = layer.mixer.outputs
    mixer = MambaSpec(
        h,
        h,
        channels=fields.count("intermediate_size", fields.count("expand") * h),
        state=fields.count("state_size"),
        rank=_rank(fields, "time_step_rank", h),
        kernel=fields.count("conv_kernel"),
        bias=fields.flag("use_bias"),
        conv_bias=fields.flag("use_conv_bias"),
    )
    return LayerSpec(mixer, MlpSpec(h, 0), replace(layer.norms, number=1, place="alone"))


def _normed(fields: ConfigFile, layer: LayerSpec, number: int) -> LayerSpec:
    return with_parts(layer, mixer={"norms": "plain", "eps": fields.number("mixer_rms_eps", 1e-6)})


def _rank(fields: ConfigFile, key: str, hidden: int) -> int:
    """Read the width of what step sizes are made of."""
    return -(-hidden // 16) if fields.get(key, "auto") == "auto" else fields.count(key)


def _periodic(fields: ConfigFile, kind: str, number: int, period: int, offset: int) -> bool:
    """Whether layer `number` is one of those of a kind, which come every so many layers."""
    period = fields.count(f"{kind}_layer_period", period)
    return number % period == fields.natural(f"{kind}_layer_offset", offset)


def _jamba(fields: ConfigFile, layer: LayerSpec, number: int) -> LayerSpec:
    h = layer.mixer.outputs
    if _periodic(fields, "expert", number, 2, 1) and fields.count("num_experts", 16) > 1:
        layer = _experts(fields, layer, number)
    if _periodic(fields, "attn", number, 8, 4):
        return with_parts(layer, mixer={"rope": None})
    mixer = MambaSpec(
        h,
        h,
        channels=fields.count("mamba_expand") * h,
        state=fields.count("mamba_d_state"),
        rank=_rank(fields, "mamba_dt_rank", h),
        kernel=fields.count("mamba_d_conv"),
        bias=fields.flag("mamba_proj_bias"),
        conv_bias=fields.flag("mamba_conv_bias"),
        norms="weights",
        eps=layer.norms.eps,
    )
    return replace(layer, mixer=mixer)


_experts = experts_in_place_of_mlps(renormalise=False)


def _unlimited(fields: ConfigFile, spec: ModelSpec) -> ModelSpec:
    """Return the model with the longest sequence that the file names, or a long one: nothing grows with it."""
    return replace(spec, max_model_len=fields.count("max_position_embeddings", _MAX_LEN))


_MAX_LEN = 1 << 20
_MODULES = ModuleNames(
    embedding="backbone.embeddings", norm="backbone.norm_f", layer="backbone.layers.{}", norms=("norm",)
)
_MAMBA: dict[str, Any] = {
    "modules": _MODULES,
    "names": {"rms_norm_eps": "layer_norm_epsilon"},
    "defaults": {
        "rms_norm_eps": 1e-5,
        "num_attention_heads": 1,
        "state_size": 16,
        "conv_kernel": 4,
        "expand": 2,
        "use_conv_bias": True,
        "tie_word_embeddings": True,
    },
    "mlp": {"gated": False},
    "activations": ("silu",),
    "read_model": _unlimited,
}
FAMILIES: dict[str, Family] = {
    "MambaForCausalLM": Family(**_MAMBA, read_layer=_selective),
    "FalconMambaForCausalLM": Family(**_MAMBA, read_layer=in_turn(_selective, _normed)),
    "JambaForCausalLM": Family(
        windows="chunks",
        names={"num_local_experts": "num_experts"},
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 262144,
            "num_experts": 16,
            "num_experts_per_tok": 2,
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_conv_bias": True,
        },
        modules=replace(STATE_SPACE_MODULES, router="feed_forward.router", experts="feed_forward.experts"),
        activations=("silu",),
        read_layer=_jamba,
    ),
    "Mamba2ForCausalLM": Family(
        modules=_MODULES,
        names={"rms_norm_eps": "layer_norm_epsilon", "num_attention_heads": "num_heads"},
        defaults={
            "rms_norm_eps": 1e-5,
            "num_attention_heads": 128,
            "num_heads": 128,
            "head_dim": 64,
            "state_size": 128,
            "n_groups": 8,
            "conv_kernel": 4,
            "expand": 2,
            "use_conv_bias": True,
            "intermediate_size": 1,
        },
        activations=("silu",),
        read_layer=_mamba2,
        read_model=_unlimited,
    ),
}
