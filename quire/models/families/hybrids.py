"""Granite 4, Bamba and Nemotron-H: selective state spaces, and attention in some layers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quire.models.config_file import ConfigFile
from quire.models.families.family import Family, ModuleNames
from quire.models.families.granite import granite_layer, granite_model
from quire.models.families.layers import in_turn
from quire.models.families.mixtures import SIGMOID, experts_in_place_of_mlps
from quire.models.layer_spec import LayerSpec, MixtureSpec, MlpSpec, with_parts
from quire.models.recurrent_spec import NoMixerSpec
from quire.models.state_space_spec import Mamba2Spec

if TYPE_CHECKING:
    from quire.models.spec import ModelSpec

_MAMBA, _ATTENTION = "linear_attention", "full_attention"
_OLDER = {"mamba": _MAMBA, "mamba2": _MAMBA, "attention": _ATTENTION}
"""What older files call the kinds of layers."""


def layer_kinds(
    fields: ConfigFile, served: Sequence[str], usual: Sequence[str] | None = None, key: str = "layer_types"
) -> tuple[str, ...]:
    """Return the kind of each layer.

    Args:
        fields: The file.
        served: The kinds that are served.
        usual: The kinds if the file names none; None: it must.
        key: The key that names them.

    Raises:
        CheckpointError: The kinds are missing or not supported.
    """
    kinds, layers = fields.get(key, usual), fields.count("num_hidden_layers")
    found = [_OLDER.get(str(kind), str(kind)) for kind in kinds] if isinstance(kinds, list | tuple) else []
    if len(found) != layers or not all(kind in served for kind in found):
        raise fields.wrong(key, f"is not supported: served are {layers} entries of {', '.join(served)}")
    return tuple(found)


def _bounds(fields: ConfigFile, key: str) -> tuple[float, float]:
    """Read the smallest and the largest step size, of which JSON may write an infinite one as an object."""
    value = fields.get(key, [0.0, math.inf])
    bounds = value if isinstance(value, list | tuple) else ()
    try:
        least, most = (float(each["__float__"] if isinstance(each, dict) else each) for each in bounds)
    except (KeyError, TypeError, ValueError):
        raise fields.wrong(key, "must be a list of two numbers") from None
    return least, most


def read_mamba2(fields: ConfigFile, hidden: int, eps: float, inner: int | None = None) -> Mamba2Spec:
    """Read a selective state space from the keys that begin with `mamba_`.

    Args:
        fields: The file.
        hidden: Width of the stream.
        eps: Added to the mean squares of the norm.
        inner: Width of all heads; None: `mamba_expand` times the stream's.

    Raises:
        CheckpointError: Numbers contradict one another.
    """
    heads, width = fields.count("mamba_n_heads"), fields.get("mamba_d_head", "auto")
    inner = inner or fields.count("mamba_expand") * hidden
    groups = fields.count("mamba_n_groups")
    mixer = Mamba2Spec(
        hidden,
        hidden,
        heads=heads,
        head_dim=inner // heads if width == "auto" else fields.count("mamba_d_head"),
        groups=groups,
        state=fields.count("mamba_d_state"),
        kernel=fields.count("mamba_d_conv"),
        bias=fields.flag("mamba_proj_bias"),
        conv_bias=fields.flag("mamba_conv_bias"),
        norm_groups=groups,
        eps=eps,
        dt_bounds=_bounds(fields, "time_step_limit"),
    )
    if mixer.inner != inner:
        raise fields.wrong("mamba_n_heads", f"must be the width of all heads ({inner}) / mamba_d_head")
    check_groups(fields, mixer, "mamba_n_groups")
    return mixer


def read_own_mamba2(fields: ConfigFile, hidden: int, eps: float, heads: str, head_dim: str, state: str) -> Mamba2Spec:
    """Read a selective state space from keys of its own, of which three have other names in each family.

    Args:
        fields: The file.
        hidden: Width of the stream.
        eps: Added to the mean squares of the norm.
        heads, head_dim, state: The keys of the number of heads, of their width and of the width of a state.

    Raises:
        CheckpointError: Numbers contradict one another.
    """
    groups = fields.count("n_groups")
    mixer = Mamba2Spec(
        hidden,
        hidden,
        heads=fields.count(heads),
        head_dim=fields.count(head_dim),
        groups=groups,
        state=fields.count(state),
        kernel=fields.count("conv_kernel"),
        bias=fields.flag("use_bias"),
        conv_bias=fields.flag("use_conv_bias"),
        norm_groups=groups,
        eps=eps,
        dt_bounds=_bounds(fields, "time_step_limit"),
    )
    check_groups(fields, mixer, "n_groups")
    return mixer


def check_groups(fields: ConfigFile, mixer: Mamba2Spec, key: str) -> None:
    """Refuse groups that do not divide the heads.

    Raises:
        CheckpointError: They do not.
    """
    if mixer.heads % mixer.groups:
        raise fields.wrong(key, f"must divide the number of heads ({mixer.heads})")


def _granite(fields: ConfigFile, layer: LayerSpec, number: int) -> LayerSpec:
    kinds = layer_kinds(fields, (_MAMBA, _ATTENTION), [_MAMBA] * fields.count("num_hidden_layers"))
    if fields.choice("position_embedding_type", ("nope", "rope"), "nope") == "nope":
        layer = with_parts(layer, mixer={"rope": None})
    layer = granite_layer(fields, layer, number)
    if kinds[number] == _ATTENTION:
        return layer
    return replace(layer, mixer=read_mamba2(fields, layer.mixer.outputs, fields.number("rms_norm_eps", 1e-6)))


def _granite_mlp(fields: ConfigFile, layer: LayerSpec, number: int) -> LayerSpec:
    """Return the layer with experts and a shared MLP, or with the latter alone."""
    if fields.natural("num_local_experts", 8):
        return _experts(fields, layer, number)
    return with_parts(layer, mlp={"width": fields.count("shared_intermediate_size")})


def _granite_model(fields: ConfigFile, spec: ModelSpec) -> ModelSpec:
    if not fields.natural("num_local_experts", 8):
        modules = replace(spec.family.modules, up=("shared_mlp.input_linear",), down="shared_mlp.output_linear")
        spec = replace(spec, family=replace(spec.family, modules=modules))
    return granite_model(fields, spec)


def _bamba(fields: ConfigFile, layer: LayerSpec, number: int) -> LayerSpec:
    layers = fields.count("num_hidden_layers")
    if number in fields.layer_numbers("attn_layer_indices", layers):
        return layer
    return replace(layer, mixer=read_mamba2(fields, layer.mixer.outputs, layer.norms.eps))


_PATTERN = {"M": _MAMBA, "*": _ATTENTION, "-": "mlp", "E": "moe"}


def _nemotron(fields: ConfigFile, layer: LayerSpec, number: int) -> LayerSpec:
    pattern = fields.get("hybrid_override_pattern")
    usual = [_PATTERN.get(kind, kind) for kind in pattern] if isinstance(pattern, str) else None
    kind = layer_kinds(fields, (_MAMBA, _ATTENTION, "mlp", "moe"), usual, "layers_block_type")[number]
    h, norms = layer.mixer.outputs, replace(layer.norms, number=1, place="alone")
    if kind in ("mlp", "moe"):
        alone = LayerSpec(NoMixerSpec(h, h), layer.mlp, norms)
        return alone if kind == "mlp" else _latent_experts(fields, alone, number)
    nothing = MlpSpec(h, 0)
    if kind == _ATTENTION:
        return with_parts(LayerSpec(layer.mixer, nothing, norms), mixer={"rope": None})
    mixer = read_own_mamba2(fields, h, norms.eps, "mamba_num_heads", "mamba_head_dim", "ssm_state_size")
    return LayerSpec(mixer, nothing, norms)


def _latent_experts(fields: ConfigFile, layer: LayerSpec, number: int) -> LayerSpec:
    """Return the layer with experts, which may read and write a narrower projection of the stream."""
    layer = experts_in_place_of_mlps(**SIGMOID)(fields, layer, number)
    if fields.get("moe_latent_size") is None:
        return layer
    assert isinstance(layer.mlp, MixtureSpec)
    if fields.flag("mlp_bias"):
        raise fields.wrong("mlp_bias", "is not supported beside moe_latent_size")
    return replace(layer, mlp=replace(layer.mlp, latent=fields.count("moe_latent_size")))


_experts = experts_in_place_of_mlps(renormalise=True)
STATE_SPACE: Mapping[str, Any] = {
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
}
"""Defaults of keys that begin with `mamba_`."""
STATE_SPACE_MODULES = ModuleNames(
    norm="model.final_layernorm",
    norms=("input_layernorm", "pre_ff_layernorm"),
    recurrent="mamba",
    up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
)
"""Names of modules in Bamba, and in models that were made like it."""
FAMILIES: dict[str, Family] = {
    "GraniteMoeHybridForCausalLM": Family(
        windows="chunks",
        names={"shared_expert_intermediate_size": "shared_intermediate_size"},
        defaults={**STATE_SPACE, "num_experts": 8, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 1024},
        modules=ModuleNames(
            recurrent="mamba",
            router="block_sparse_moe.router",
            experts="block_sparse_moe.experts",
            shared_up=("shared_mlp.input_linear",),
            shared_down="shared_mlp.output_linear",
        ),
        activations=("silu",),
        read_layer=in_turn(_granite, _granite_mlp),
        read_model=_granite_model,
    ),
    "BambaForCausalLM": Family(
        windows="chunks",
        partial_rotary=True,
        defaults={
            **STATE_SPACE,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "max_position_embeddings": 262144,
        },
        modules=STATE_SPACE_MODULES,
        activations=("silu",),
        read_layer=_bamba,
    ),
    "NemotronHForCausalLM": Family(
        windows="chunks",
        names={
            "rms_norm_eps": ("layer_norm_epsilon", "rms_norm_eps"),
            "hidden_act": "mlp_hidden_act",
            "num_hidden_layers": ("num_hidden_layers", "layers_block_type"),
            "num_experts": "n_routed_experts",
            "shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
        },
        defaults={
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 4096,
            "hidden_act": "relu2",
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "ssm_state_size": 128,
            "n_groups": 8,
            "conv_kernel": 4,
            "use_conv_bias": True,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 7688,
            "shared_expert_intermediate_size": 7688,
            "norm_topk_prob": True,
        },
        modules=ModuleNames(
            embedding="model.embeddings",
            norm="model.norm_f",
            norms=("norm",),
            qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
            out="mixer.o_proj",
            up=("mixer.up_proj",),
            down="mixer.down_proj",
            router="mixer.gate",
            experts="mixer.experts",
            expert=("", "up_proj", "down_proj"),
            correction="mixer.gate.e_score_correction_bias",
            expert_latents=("mixer.fc1_latent_proj", "mixer.fc2_latent_proj"),
            shared_up=("mixer.shared_experts.up_proj",),
            shared_down="mixer.shared_experts.down_proj",
            older=(("backbone.", "model."),),
        ),
        activations=("relu2",),
        mlp={"gated": False},
        read_layer=_nemotron,
    ),
}
