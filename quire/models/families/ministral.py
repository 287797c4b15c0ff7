"""Ministral 3: the scores of queries grow with their positions beyond the original length."""

from __future__ import annotations

from quire.models.config_file import ConfigFile
from quire.models.families.family import Family
from quire.models.layer_spec import LayerSpec, QueryScaleSpec, with_parts

_LENGTH = "original_max_position_embeddings"


def query_scale(fields: ConfigFile, layer: LayerSpec, number: int) -> LayerSpec:
    """Return the layer with queries that are scaled by their positions, if the file says so."""
    values = fields.get("rope_parameters") or {}
    if not values.get("llama_4_scaling_beta"):
        return layer
    growth = fields.positive("rope_parameters", values["llama_4_scaling_beta"], "llama_4_scaling_beta")
    length = int(fields.positive("rope_parameters", values.get(_LENGTH), _LENGTH))
    return with_parts(layer, mixer={"query_scale": QueryScaleSpec(growth, length)})


FAMILIES: dict[str, Family] = {
    "Ministral3ForCausalLM": Family(
        windows="all",
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 262144,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 16.0,
                _LENGTH: 16384,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
        read_layer=query_scale,
    ),
}
