"""Gemma 3n: several streams that layers predict and correct, sparse MLPs, and layers that read another's cache."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from quire.models.config_file import ConfigFile
from quire.models.families.family import Family, ModuleNames
from quire.models.families.gemma import AROUND
from quire.models.families.gemma4 import cache_sources
from quire.models.kv_cache_groups import read_windowed_layers
from quire.models.layer_spec import AttentionSpec, LayerInputSpec, LayerSpec, MlpSpec, QKNormSpec, StreamsSpec

if TYPE_CHECKING:
    from quire.models.spec import ModelSpec

_SPARSE_LAYERS, _USUAL_SPARSITY = 10, 0.95


def _layer(fields: ConfigFile, layer: LayerSpec, number: int) -> LayerSpec:
    layers, mixer, mlp = fields.count("num_hidden_layers"), layer.mixer, layer.mlp
    assert isinstance(mixer, AttentionSpec) and isinstance(mlp, MlpSpec)
    source = cache_sources(fields, read_windowed_layers(fields, FAMILIES[_NAME], layers))[number]
    streams = StreamsSpec(mlp.hidden, fields.count("altup_num_inputs", 4), fields.count("laurel_rank", 64))
    return replace(
        layer,
        mixer=replace(mixer, source=source),
        mlp=replace(mlp, sparsity=_sparsity(fields, layers, number)),
        input=LayerInputSpec(mlp.hidden, fields.count("hidden_size_per_layer_input", 256), mlp.activation),
        streams=streams,
    )


def _sparsity(fields: ConfigFile, layers: int, number: int) -> float:
    """Return the share of gates that are 0 in the layer's MLP."""
    key = "activation_sparsity_pattern"
    of_layers = fields.get(key)
    if of_layers is None:
        return _USUAL_SPARSITY if number < _SPARSE_LAYERS < layers else 0.0
    known = isinstance(of_layers, list) and len(of_layers) == layers
    if not known or not all(isinstance(each, int | float) and 0 <= each < 1 for each in of_layers):
        raise fields.wrong(key, f"must have {layers} numbers from 0 to 1")
    return float(of_layers[number])


def _model(fields: ConfigFile, spec: ModelSpec) -> ModelSpec:
    vocab = fields.count("vocab_size_per_layer_input", 262144)
    return replace(spec, embedding_scale=spec.hidden**0.5, layer_input_vocab=vocab)


_NAME = "Gemma3nForCausalLM"
FAMILIES: dict[str, Family] = {
    _NAME: Family(
        decoder="quire.models.gemma3n:Gemma3n",
        modules=ModuleNames(norms=AROUND),
        names={"hidden_act": "hidden_activation"},
        defaults={
            "hidden_act": "gelu_pytorch_tanh",
            "head_dim": 256,
            "num_key_value_heads": 2,
            "num_kv_shared_layers": 15,
            "tie_word_embeddings": True,
            "sliding_window": 512,
            "sliding_window_pattern": 5,
            "final_logit_softcapping": 30.0,
            "rope_theta": 1e6,
            "max_position_embeddings": 32768,
        },
        windows="by type",
        local_rope=True,
        mixer={"scale": 1.0, "qk_norm": QKNormSpec(), "values": "normed"},
        norms={"number": 5, "place": "around"},
        only={"altup_active_idx": (0,), "altup_correct_scale": (True,)},
        read_layer=_layer,
        read_model=_model,
        overflows_float16=True,
    ),
}
