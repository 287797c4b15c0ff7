"""ERNIE 4.5."""

from __future__ import annotations

from typing import Any

from quire.models.config_file import ConfigFile
from quire.models.families.family import Family, ModuleNames
from quire.models.families.layers import in_turn, interleaved
from quire.models.families.mixtures import experts_in_place_of_mlps
from quire.models.layer_spec import LayerSpec


def _experts(fields: ConfigFile, layer: LayerSpec, number: int) -> LayerSpec:
    least = fields.number("moe_norm_min", 1e-12)
    routing: dict[str, Any] = {"correction": True, "renormalise": True, "epsilon": least, "fp32": "weight"}
    return experts_in_place_of_mlps(**routing)(fields, layer, number)


_BIASES = {"attention_bias": "use_bias", "mlp_bias": "use_bias"}
_DEFAULTS: dict[str, Any] = {
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}
FAMILIES: dict[str, Family] = {
    "Ernie4_5ForCausalLM": Family(
        names=_BIASES, defaults=_DEFAULTS | {"num_key_value_heads": 2}, read_layer=interleaved
    ),
    "Ernie4_5_MoeForCausalLM": Family(
        modules=ModuleNames(
            correction="mlp.moe_statics.e_score_correction_bias",
            others=((".mlp.gate.moe_statics.", ".mlp.moe_statics."),),
        ),
        only={"use_bias": (False,)},  # its head has a bias then, even if it is the embedding
        names={
            "num_experts": "moe_num_experts",
            "num_experts_per_tok": "moe_k",
            "num_shared_experts": "moe_num_shared_experts",
            "first_k_dense_replace": "moe_layer_start_index",
            "decoder_sparse_step": "moe_layer_interval",
        },
        defaults={key: value for key, value in _DEFAULTS.items() if key != "head_dim"}
        | {
            "num_key_value_heads": 4,
            "num_experts": 64,
            "num_experts_per_tok": 6,
            "num_shared_experts": 2,
            "moe_intermediate_size": 1536,
            "first_k_dense_replace": 1,
        },
        read_layer=in_turn(interleaved, _experts),
    ),
}
