"""Blocks' parts that several families share: attention and the gated MLP, under the names of their checkpoints."""

from __future__ import annotations

from quire.compute.attention.backend import AttentionLayer
from quire.models.layers.attention import Attention, Heads
from quire.models.layers.factory import LayerFactory, Outputs
from quire.models.layers.mlp import MLP
from quire.models.layers.norm import RMS
from quire.models.spec import ModelSpec


def build_attention(spec: ModelSpec, build: LayerFactory, layer: int, name: str, norm: RMS) -> Attention:
    """Attention of layer number `layer`; queries, keys and values stored one by one or as one projection."""
    heads = Heads(spec.heads, spec.kv_heads, spec.head_dim)
    names: tuple[str, ...] = (f"{name}.q_proj", f"{name}.k_proj", f"{name}.v_proj")
    if spec.family.fused:
        names = (f"{name}.qkv_proj",)
    return build.attention(
        attention_layer(spec, build, layer),
        heads,
        build.qkv(names, heads, spec.hidden, spec.qkv_bias),
        build.row_parallel(f"{name}.o_proj", spec.hidden, Outputs(heads.query, heads.width), spec.out_bias),
        build.head_norm(name, heads, norm) if spec.family.qk_norm else None,
    )


def attention_layer(spec: ModelSpec, build: LayerFactory, layer: int) -> AttentionLayer:
    """What is layer number `layer`'s own in attention."""
    number = layer - build.own_layers(spec.layers).start
    return AttentionLayer(number, spec.scales[layer], spec.attention_cap)


def build_gated_mlp(spec: ModelSpec, build: LayerFactory, name: str) -> MLP:
    """The MLP with a gate; gate and up stored one by one or as one projection."""
    width = spec.intermediate
    names: tuple[str, ...] = (f"{name}.gate_proj", f"{name}.up_proj")
    if spec.family.fused:
        names = (f"{name}.gate_up_proj",)
    gate_up = build.gate_up(names, width, spec.hidden, spec.mlp_bias, spec.activation)
    down = build.row_parallel(f"{name}.down_proj", spec.hidden, width, spec.mlp_bias)
    return build.gated_mlp(gate_up, down, width, spec.activation)
