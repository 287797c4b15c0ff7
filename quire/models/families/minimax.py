"""MiniMax-01: lightning attention in some layers, and a stream that goes on from its norms."""

from __future__ import annotations

from dataclasses import replace

from quire.models.config_file import ConfigFile
from quire.models.families.family import Family, ModuleNames
from quire.models.families.hybrids import layer_kinds
from quire.models.families.layers import in_turn
from quire.models.families.mixtures import experts_in_place_of_mlps
from quire.models.layer_spec import LayerSpec, with_parts
from quire.models.recurrent_spec import LightningSpec

_KINDS = ("linear_attention", "full_attention")
_SMALL = 1e-5


def _mixer(fields: ConfigFile, layer: LayerSpec, number: int) -> LayerSpec:
    layers, own = fields.count("num_hidden_layers"), layer.mixer
    kind = layer_kinds(fields, _KINDS, [_KINDS[(layer + 1) % 2] for layer in range(layers)])[number]
    key = "full_attn_alpha_factor" if kind == "full_attention" else "linear_attn_alpha_factor"
    kept = fields.number(key, 1.0), fields.number("mlp_alpha_factor", 1.0)
    layer = with_parts(layer, norms={"place": "on normed", "kept": kept})
    if kind == "full_attention":
        return layer
    share = 1 - number / (layers - 1 + _SMALL) + _SMALL
    rates = tuple(-(2 ** (-8 * (head + 1) / own.heads)) * share for head in range(own.heads))
    return replace(layer, mixer=LightningSpec(own.outputs, own.outputs, own.heads, own.head_dim, rates))


_ONE = (1, 1.0)
FAMILIES: dict[str, Family] = {
    "MiniMaxForCausalLM": Family(
        windows="chunks",
        modules=ModuleNames(
            recurrent="self_attn",
            router="block_sparse_moe.gate",
            experts="block_sparse_moe.experts",
            expert=("w1", "w3", "w2"),
            others=((".mlp.", ".block_sparse_moe."),),
            unread_in_layers=tuple(
                f"self_attn.{rate}" for rate in ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
            ),
        ),
        only={
            "sliding_window": (),
            "full_attn_beta_factor": _ONE,
            "linear_attn_beta_factor": _ONE,
            "mlp_beta_factor": _ONE,
        },
        defaults={
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "max_position_embeddings": 131072,
        },
        activations=("silu",),
        read_layer=in_turn(_mixer, experts_in_place_of_mlps(renormalise=True)),
    ),
}
