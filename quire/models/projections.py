"""Builds attention and gated MLPs, which several families share."""

from __future__ import annotations

from quire.compute.attention.backend import AttentionLayer
from quire.compute.kernels.reference.attention_inputs import Scores
from quire.models.layer_spec import MlpSpec
from quire.models.layers.attention import Attention, Heads
from quire.models.layers.factory import LayerFactory, Outputs
from quire.models.layers.mlp import MLP
from quire.models.layers.norm import RMS
from quire.models.spec import ModelSpec


def build_attention(spec: ModelSpec, build: LayerFactory, layer: int, name: str, norm: RMS) -> Attention:
    """Build the attention of layer number `layer`; queries, keys and values may be stored one by one or as one
    projection.
    """
    own = spec.layers[layer].mixer
    heads = Heads(own.heads, own.kv_heads, own.head_dim)
    names: tuple[str, ...] = (f"{name}.q_proj", f"{name}.k_proj", f"{name}.v_proj")
    if spec.family.fused:
        names = (f"{name}.qkv_proj",)
    return build.attention(
        attention_layer(spec, build, layer),
        heads,
        build.qkv(names, heads, own.inputs, own.qkv_bias),
        build.row_parallel(f"{name}.o_proj", spec.hidden, Outputs(heads.query, heads.width), own.out_bias),
        build.head_norm(name, heads, norm) if own.qk_norm else None,
    )


def attention_layer(spec: ModelSpec, build: LayerFactory, layer: int) -> AttentionLayer:
    """Return the properties of layer number `layer` that the attention backend needs."""
    own = spec.layers[layer].mixer
    return AttentionLayer(layer - build.own_layers(len(spec.layers)).start, Scores(own.scale, own.cap))


def build_gated_mlp(spec: ModelSpec, build: LayerFactory, layer: int, name: str) -> MLP:
    """Build the gated MLP of layer number `layer`; gate and up may be stored one by one or as one projection."""
    mlp = spec.layers[layer].mlp
    assert isinstance(mlp, MlpSpec)
    names: tuple[str, ...] = (f"{name}.gate_proj", f"{name}.up_proj")
    if spec.family.fused:
        names = (f"{name}.gate_up_proj",)
    gate_up = build.gate_up(names, mlp.width, mlp.hidden, mlp.bias, mlp.activation)
    down = build.row_parallel(f"{name}.down_proj", mlp.hidden, mlp.width, mlp.bias)
    return build.gated_mlp(gate_up, down, mlp.width, mlp.activation)
