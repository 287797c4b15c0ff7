"""GPT-2: learned positions, layer norms, biases, and an MLP without a gate."""

from __future__ import annotations

from quire.models.config_file import ConfigFile
from quire.models.families.family import Family, ModuleNames
from quire.models.layer_spec import LayerSpec, with_parts


def gpt2_scale(fields: ConfigFile, layer: LayerSpec, number: int) -> LayerSpec:
    """Return the layer with its own scale of scores."""
    scale = layer.mixer.scale if fields.flag("scale_attn_weights", True) else 1.0
    by_layer = fields.flag("scale_attn_by_inverse_layer_idx")
    return with_parts(layer, mixer={"scale": scale / (number + 1) if by_layer else scale})


GPT2_MODULES = ModuleNames(
    embedding="transformer.wte",
    positions="transformer.wpe",
    norm="transformer.ln_f",
    layer="transformer.h.{}",
    norms=("ln_1", "ln_2"),
    qkv=("attn.c_attn",),
    out="attn.c_proj",
    up=("mlp.c_fc",),
    down="mlp.c_proj",
    transposed=True,
)
GPT2_NAMES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "num_key_value_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "intermediate_size": "n_inner",
    "hidden_act": "activation_function",
    "rms_norm_eps": "layer_norm_epsilon",
}
GPT2_DEFAULTS = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 1024,
    "vocab_size": 50257,
    "hidden_act": "gelu_new",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
FAMILIES: dict[str, Family] = {
    "GPT2LMHeadModel": Family(
        modules=GPT2_MODULES,
        names=GPT2_NAMES,
        defaults=GPT2_DEFAULTS,
        activations=("gelu_new", "gelu_pytorch_tanh"),
        mixer={"rope": None, "qkv_bias": True, "out_bias": True},
        mlp={"gated": False, "bias": True},
        norms={"kind": "layer", "bias": True},
        read_layer=gpt2_scale,
    ),
}
