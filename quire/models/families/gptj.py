"""GPT-J and CodeGen: attention and MLP in parallel behind one layer norm, and a head with a bias."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quire.models.config_file import ConfigFile
from quire.models.families.family import Family, ModuleNames
from quire.models.families.gpt2 import GPT2_NAMES
from quire.models.layer_spec import LayerSpec, with_parts
from quire.models.rope_spec import RopeSpec

if TYPE_CHECKING:
    from quire.models.spec import ModelSpec


def _rotated_in_part(fields: ConfigFile, layer: LayerSpec, number: int) -> LayerSpec:
    width, head_dim = fields.count("rotary_dim"), layer.mixer.head_dim
    if width > head_dim or width % 2:
        raise fields.wrong("rotary_dim", f"must be even, and at most the width of a head ({head_dim})")
    return with_parts(layer, mixer={"rope": RopeSpec(share=width / head_dim, interleaved=True)})


def _biased_head(fields: ConfigFile, spec: ModelSpec) -> ModelSpec:
    return replace(spec, head_bias=True)


MODULES = ModuleNames(
    embedding="transformer.wte",
    norm="transformer.ln_f",
    layer="transformer.h.{}",
    norms=("ln_1",),
    qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
    out="attn.out_proj",
    up=("mlp.fc_in",),
    down="mlp.fc_out",
)
GPTJ: dict[str, Any] = {
    "names": GPT2_NAMES,
    "defaults": {
        "hidden_size": 4096,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "max_position_embeddings": 2048,
        "vocab_size": 50400,
        "hidden_act": "gelu_new",
        "rms_norm_eps": 1e-5,
        "rotary_dim": 64,
    },
    "only": {"tie_word_embeddings": (False,)},
    "activations": ("gelu_new", "gelu_pytorch_tanh"),
    "mixer": {"qkv_bias": False, "out_bias": False},
    "mlp": {"gated": False, "bias": True},
    "norms": {"kind": "layer", "bias": True, "number": 1, "place": "parallel"},
    "read_layer": _rotated_in_part,
    "read_model": _biased_head,
}
_CODEGEN = replace(MODULES, qkv=("attn.qkv_proj",), qkv_layout="four blocks")
FAMILIES: dict[str, Family] = {
    "GPTJForCausalLM": Family(modules=MODULES, **GPTJ),
    "CodeGenForCausalLM": Family(modules=_CODEGEN, **GPTJ),
}
