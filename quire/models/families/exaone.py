"""EXAONE 4 and K-EXAONE: normed queries and keys, and no rotation in layers without a window."""

from __future__ import annotations

from quire.models.config_file import ConfigFile
from quire.models.families.family import Family, ModuleNames
from quire.models.families.layers import in_turn
from quire.models.families.mixtures import SIGMOID, experts_in_place_of_mlps
from quire.models.kv_cache_groups import read_window
from quire.models.layer_spec import LayerSpec, QKNormSpec, with_parts


def rotated_in_windows(fields: ConfigFile, layer: LayerSpec, number: int) -> LayerSpec:
    """Return the layer without rotation, if it has no window and others do."""
    everywhere = read_window(fields) is None or layer.mixer.window is not None
    return layer if everywhere else with_parts(layer, mixer={"rope": None})


FAMILIES: dict[str, Family] = {
    "Exaone4ForCausalLM": Family(
        modules=ModuleNames(norms=("post_attention_layernorm", "post_feedforward_layernorm")),
        windows="by type",
        mixer={"qk_norm": QKNormSpec(), "qkv_bias": False, "out_bias": False},
        mlp={"bias": False},
        norms={"place": "behind"},
        defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4, "num_key_value_heads": 32},
        read_layer=rotated_in_windows,
    ),
    "ExaoneMoeForCausalLM": Family(
        modules=ModuleNames(correction="mlp.e_score_correction_bias", others=((".mlp.gate.e_score", ".mlp.e_score"),)),
        windows="by type",
        mixer={"qk_norm": QKNormSpec(), "qkv_bias": False, "out_bias": False},
        mlp={"bias": False},
        defaults={
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "num_key_value_heads": 32,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "num_shared_experts": 1,
            "moe_intermediate_size": 1024,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
        },
        only={"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
        read_layer=in_turn(rotated_in_windows, experts_in_place_of_mlps(**SIGMOID)),
    ),
}
