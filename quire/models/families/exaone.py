"""EXAONE 4: norms behind attention and MLP, normed queries and keys, and no rotation in layers without a window."""

from __future__ import annotations

from quire.models.config_file import ConfigFile
from quire.models.families.family import Family, ModuleNames
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
}
