"""gpt-oss: windows by turns, sinks, and experts with biases and clamped gates."""

from __future__ import annotations

from dataclasses import replace

from quire.compute.kernels.activations import Activation
from quire.models.config_file import ConfigFile
from quire.models.families.family import Family, ModuleNames
from quire.models.families.mixtures import read_mixture
from quire.models.layer_spec import LayerSpec, MlpSpec


def _experts(fields: ConfigFile, layer: LayerSpec, number: int) -> LayerSpec:
    """Return the layer with experts; a softmax of the chosen experts' scores is one of all, renormalised."""
    assert isinstance(layer.mlp, MlpSpec)
    alpha, limit = fields.number("swiglu_alpha", 1.702), fields.number("swiglu_limit", 7.0)
    mixture = read_mixture(fields, layer.mlp, {"bias": True, "renormalise": True})
    return replace(layer, mlp=replace(mixture, activation=Activation("swigluoai", alpha, limit), biases=True))


FAMILIES: dict[str, Family] = {
    "GptOssForCausalLM": Family(
        modules=ModuleNames(router="mlp.router", transposed_experts=True),
        activations=("silu",),
        windows="by type",
        mixer={"sinks": True},
        defaults={
            "num_experts": 128,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
            "sliding_window_pattern": 2,
            "head_dim": 64,
            "attention_bias": True,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            "max_position_embeddings": 131072,
        },
        read_layer=_experts,
    ),
}
