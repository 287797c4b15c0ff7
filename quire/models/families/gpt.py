"""Older relatives of GPT-2: layer norms with biases, and MLPs without a gate."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quire.models.config_file import ConfigFile
from quire.models.families.family import Family, ModuleNames
from quire.models.families.gpt2 import GPT2_DEFAULTS, GPT2_MODULES, GPT2_NAMES, gpt2_scale
from quire.models.layer_spec import LayerSpec, QKNormSpec, with_parts

if TYPE_CHECKING:
    from quire.models.spec import ModelSpec

GELU = ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu")
_ONE_KV_HEAD_EACH = {"num_key_value_heads": "num_attention_heads"}
_LAYER_NORMS: dict[str, Any] = {"kind": "layer", "bias": True}
_NO_GATE: dict[str, Any] = {"gated": False, "bias": True}
_BIASES: dict[str, Any] = {"qkv_bias": True, "out_bias": True}
_FALCON = ModuleNames(
    embedding="transformer.word_embeddings",
    norm="transformer.ln_f",
    layer="transformer.h.{}",
    qkv=("self_attention.query_key_value",),
    out="self_attention.dense",
    up=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
)
_OPT = ModuleNames(
    embedding="model.decoder.embed_tokens",
    positions="model.decoder.embed_positions",
    norm="model.decoder.final_layer_norm",
    layer="model.decoder.layers.{}",
    norms=("self_attn_layer_norm", "final_layer_norm"),
    out="self_attn.out_proj",
    up=("fc1",),
    down="fc2",
    older=(("decoder.", "model.decoder."),),
)


def _bigcode_layer(fields: ConfigFile, layer: LayerSpec, number: int) -> LayerSpec:
    kv_heads = 1 if fields.flag("multi_query", True) else layer.mixer.heads
    return with_parts(gpt2_scale(fields, layer, number), mixer={"kv_heads": kv_heads})


def _bigcode_model(fields: ConfigFile, spec: ModelSpec) -> ModelSpec:
    layout = "kinds" if fields.flag("multi_query", True) else "groups"
    return replace(spec, family=_with_modules(spec.family, qkv_layout=layout))


def _neox_layer(fields: ConfigFile, layer: LayerSpec, number: int) -> LayerSpec:
    place = "parallel" if fields.flag("use_parallel_residual", True) else "before"
    return with_parts(layer, norms={"place": place})


def _persimmon_layer(fields: ConfigFile, layer: LayerSpec, number: int) -> LayerSpec:
    norm = QKNormSpec("layer", bias=True) if fields.flag("qk_layernorm", True) else None
    return with_parts(layer, mixer={"qk_norm": norm})


def _falcon_layer(fields: ConfigFile, layer: LayerSpec, number: int) -> LayerSpec:
    new, heads = fields.flag("new_decoder_architecture"), layer.mixer.heads
    kv_heads = fields.count("num_kv_heads", heads) if new else 1 if fields.flag("multi_query", True) else heads
    bias, norms = fields.flag("bias"), _falcon_norms(fields)
    place = "parallel" if new or fields.flag("parallel_attn", True) else "before"
    return with_parts(
        layer,
        mixer={"kv_heads": kv_heads, "qkv_bias": bias, "out_bias": bias},
        mlp={"bias": bias},
        norms={"place": place, "number": len(norms)},
    )


def _falcon_model(fields: ConfigFile, spec: ModelSpec) -> ModelSpec:
    new, several = fields.flag("new_decoder_architecture"), fields.flag("multi_query", True)
    layout = "kinds" if several and not new else "groups"
    return replace(spec, family=_with_modules(spec.family, qkv_layout=layout, norms=_falcon_norms(fields)))


def _falcon_norms(fields: ConfigFile) -> tuple[str, ...]:
    new = fields.flag("new_decoder_architecture")
    if not fields.flag("parallel_attn", True):
        if new:
            raise fields.wrong("parallel_attn", "is not supported with new_decoder_architecture")
        return "input_layernorm", "post_attention_layernorm"
    number = fields.count("num_ln_in_parallel_attn", 2 if new else 1)
    return ("ln_attn", "ln_mlp") if number == 2 else ("input_layernorm",)


def _gpt_neo_layer(fields: ConfigFile, layer: LayerSpec, number: int) -> LayerSpec:
    """Return the layer with its window, if it is a local one; scores are not scaled."""
    layers = fields.count("num_hidden_layers")
    kinds = fields.get("attention_layers")
    if kinds is None:
        types = fields.get("attention_types", [[["global", "local"], layers // 2]])
        kinds = [kind for names, times in types for _ in range(times) for kind in names]
    if not isinstance(kinds, list) or len(kinds) != layers or not set(kinds) <= {"global", "local"}:
        raise fields.wrong("attention_layers", f"must be {layers} entries of global, local")
    window = fields.count("window_size", 256) if kinds[number] == "local" else None
    return with_parts(layer, mixer={"window": window, "scale": 1.0})


def _opt_layer(fields: ConfigFile, layer: LayerSpec, number: int) -> LayerSpec:
    bias, affine = fields.flag("enable_bias", True), fields.flag("layer_norm_elementwise_affine", True)
    if fields.count("word_embed_proj_dim", layer.mixer.outputs) != layer.mixer.outputs:
        raise fields.wrong("word_embed_proj_dim", "must be hidden_size: projected embeddings are not supported")
    return with_parts(
        layer,
        mixer={"qkv_bias": bias, "out_bias": bias},
        mlp={"bias": bias},
        norms={"eps": 1e-5, "weight": affine, "bias": affine},
    )


def _offset(fields: ConfigFile, spec: ModelSpec) -> ModelSpec:
    return replace(spec, position_offset=2)


def _biogpt(fields: ConfigFile, spec: ModelSpec) -> ModelSpec:
    scale = spec.hidden**0.5 if fields.flag("scale_embedding", True) else None
    return replace(spec, position_offset=2, embedding_scale=scale)


def _with_modules(family: Family, **names: Any) -> Family:
    return replace(family, modules=replace(family.modules, **names))


FAMILIES: dict[str, Family] = {
    "GPTBigCodeForCausalLM": Family(
        modules=replace(GPT2_MODULES, transposed=False),
        names=GPT2_NAMES,
        defaults=GPT2_DEFAULTS | {"hidden_act": "gelu_pytorch_tanh"},
        activations=GELU,
        mixer={"rope": None, **_BIASES},
        mlp=_NO_GATE,
        norms=_LAYER_NORMS,
        read_layer=_bigcode_layer,
        read_model=_bigcode_model,
    ),
    "GPTNeoXForCausalLM": Family(
        modules=ModuleNames(
            embedding="gpt_neox.embed_in",
            norm="gpt_neox.final_layer_norm",
            layer="gpt_neox.layers.{}",
            qkv=("attention.query_key_value",),
            qkv_layout="groups",
            out="attention.dense",
            up=("mlp.dense_h_to_4h",),
            down="mlp.dense_4h_to_h",
            older=(("embed_out.", "lm_head."),),
        ),
        names={
            "rms_norm_eps": "layer_norm_eps",
            "partial_rotary_factor": "rotary_pct",
            "rope_theta": "rotary_emb_base",
        }
        | _ONE_KV_HEAD_EACH,
        activations=GELU,
        partial_rotary=True,
        mlp=_NO_GATE,
        norms=_LAYER_NORMS,
        defaults={
            "hidden_act": "gelu",
            "rms_norm_eps": 1e-5,
            "attention_bias": True,
            "partial_rotary_factor": 0.25,
        },
        read_layer=_neox_layer,
    ),
    "PersimmonForCausalLM": Family(
        modules=ModuleNames(
            norm="model.final_layernorm",
            qkv=("self_attn.query_key_value",),
            qkv_layout="groups",
            out="self_attn.dense",
            query_norm="self_attn.q_layernorm",
            key_norm="self_attn.k_layernorm",
            up=("mlp.dense_h_to_4h",),
            down="mlp.dense_4h_to_h",
        ),
        names={"rms_norm_eps": "layer_norm_eps"} | _ONE_KV_HEAD_EACH,
        activations=("relu2",),
        partial_rotary=True,
        mixer=_BIASES,
        mlp=_NO_GATE,
        norms=_LAYER_NORMS,
        defaults={
            "hidden_act": "relu2",
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "max_position_embeddings": 16384,
        },
        read_layer=_persimmon_layer,
    ),
    "FalconForCausalLM": Family(
        modules=_FALCON,
        names={
            "rms_norm_eps": "layer_norm_epsilon",
            "hidden_act": "activation",
            "intermediate_size": "ffn_hidden_size",
        },
        only={"alibi": (False,)},
        activations=GELU,
        mlp={"gated": False},
        norms=_LAYER_NORMS,
        defaults={"hidden_act": "gelu", "rms_norm_eps": 1e-5, "tie_word_embeddings": True},
        read_layer=_falcon_layer,
        read_model=_falcon_model,
    ),
    "GPTNeoForCausalLM": Family(
        modules=replace(
            GPT2_MODULES,
            qkv=tuple(f"attn.attention.{each}_proj" for each in "qkv"),
            out="attn.attention.out_proj",
            transposed=False,
        ),
        names={
            "num_hidden_layers": "num_layers",
            "num_attention_heads": "num_heads",
            "num_key_value_heads": "num_heads",
            "hidden_act": "activation_function",
            "rms_norm_eps": "layer_norm_epsilon",
        },
        activations=GELU,
        mixer={"rope": None, "qkv_bias": False, "out_bias": True},
        mlp=_NO_GATE,
        norms=_LAYER_NORMS,
        defaults={"hidden_act": "gelu_new", "rms_norm_eps": 1e-5, "tie_word_embeddings": True},
        read_layer=_gpt_neo_layer,
    ),
    "OPTForCausalLM": Family(
        modules=_OPT,
        names={"hidden_act": "activation_function", "intermediate_size": "ffn_dim"} | _ONE_KV_HEAD_EACH,
        only={"do_layer_norm_before": (True,), "_remove_final_layer_norm": (False,)},
        activations=GELU,
        mixer={"rope": None},
        mlp={"gated": False},
        norms=_LAYER_NORMS,
        defaults={"hidden_act": "relu", "tie_word_embeddings": True, "intermediate_size": 3072},
        read_layer=_opt_layer,
        read_model=_offset,
    ),
    "BioGptForCausalLM": Family(
        modules=replace(
            _OPT,
            embedding="biogpt.embed_tokens",
            positions="biogpt.embed_positions",
            norm="biogpt.layer_norm",
            layer="biogpt.layers.{}",
            head="output_projection",
            older=(),
        ),
        names={"rms_norm_eps": "layer_norm_eps"} | _ONE_KV_HEAD_EACH,
        activations=GELU,
        mixer={"rope": None, **_BIASES},
        mlp=_NO_GATE,
        norms=_LAYER_NORMS,
        defaults={"hidden_act": "gelu", "tie_word_embeddings": True, "max_position_embeddings": 1024},
        read_layer=lambda fields, layer, number: with_parts(layer, norms={"eps": 1e-5}),
        read_model=_biogpt,
    ),
}
