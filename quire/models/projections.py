"""Builds attention, MLPs and experts under the names that a family's checkpoints give them."""

from __future__ import annotations

from torch import Tensor

from quire.compute.attention.backend import AttentionLayer
from quire.compute.kernels.reference.attention_inputs import NormRopeForm, Scores
from quire.models.families.family import ModuleNames
from quire.models.layer_spec import AttentionSpec, MixtureSpec, QKNormSpec
from quire.models.layers.attention import Attention, Heads
from quire.models.layers.factory import LayerFactory, Outputs
from quire.models.layers.mixture import MixtureNames, MixtureOfExperts
from quire.models.layers.mlp import MLP
from quire.models.layers.norm import RMS
from quire.models.quantization.scheme import ExpertNames
from quire.models.spec import ModelSpec


def build_attention(spec: ModelSpec, build: LayerFactory, layer: int) -> Attention:
    """Build the attention of layer number `layer`; queries, keys and values may be stored one by one or as one
    projection.
    """
    own, modules, name = spec.layers[layer].mixer, spec.family.modules, spec.layer_name(layer)
    heads, norms = Heads(own.heads, own.kv_heads, own.head_dim), spec.layers[layer].norms
    names = _within(name, modules.qkv if own.gate is None else (*modules.qkv, modules.gate))
    norm_names = f"{name}.{modules.query_norm}", f"{name}.{modules.key_norm}"
    kind = RMS(norms.eps, norms.unit_offset)
    inner = Outputs(heads.query, heads.width)
    sinks = build.sinks(f"{name}.{modules.sinks}", own.heads) if own.sinks else None
    return build.attention(
        attention_layer(spec, build, layer, sinks),
        heads,
        build.qkv(names, heads, own.inputs, own.qkv_bias, modules.transposed, own.gate, modules.qkv_layout),
        build.row_parallel(f"{name}.{modules.out}", spec.hidden, inner, own.out_bias, modules.transposed),
        None if own.qk_norm is None else build.qk_norm(norm_names, heads, own.qk_norm, kind),
        norm_rope_form(own),
        own.gate,
    )


def norm_rope_form(own: AttentionSpec) -> NormRopeForm:
    """Return how queries and keys are normed and rotated."""
    norm = own.qk_norm or QKNormSpec()
    interleaved = own.rope is not None and own.rope.interleaved
    return NormRopeForm(interleaved, norm.kind == "layer", norm.behind_rope, own.clip)


def attention_layer(spec: ModelSpec, build: LayerFactory, layer: int, sinks: Tensor | None = None) -> AttentionLayer:
    """Return the properties of layer number `layer` that the attention backend needs."""
    own = spec.layers[layer].mixer
    scores = Scores(own.scale, own.cap, sinks, build.slopes(own.slopes))
    return AttentionLayer(layer - build.own_layers(len(spec.layers)).start, scores)


def build_mlp(spec: ModelSpec, build: LayerFactory, layer: int) -> MLP | MixtureOfExperts:
    """Build the MLP of layer number `layer`, or its experts; gate and up may be stored one by one or as one
    projection.
    """
    mlp, modules, name = spec.layers[layer].mlp, spec.family.modules, spec.layer_name(layer)
    if isinstance(mlp, MixtureSpec):
        return build.experts(mlp, _mixture_names(name, modules))
    names, transposed = _within(name, modules.up), modules.transposed
    if mlp.gated:
        up = build.gate_up(names, mlp.width, mlp.hidden, mlp.bias, mlp.activation)
    else:
        up = build.column_parallel(names, (mlp.width,), mlp.hidden, mlp.bias, transposed)
    down = build.row_parallel(f"{name}.{modules.down}", mlp.hidden, mlp.width, mlp.bias, transposed)
    if mlp.gated:
        return build.gated_mlp(up, down, mlp.width, mlp.activation)
    return build.plain_mlp(f"{name}.{modules.activation}", up, down, mlp.width, mlp.activation)


def norm_names(spec: ModelSpec, layer: int) -> tuple[str, ...]:
    """Return the names of the norms of the stream in layer number `layer`, in the order of their use."""
    return _within(spec.layer_name(layer), spec.family.modules.norms)


def _mixture_names(layer: str, modules: ModuleNames) -> MixtureNames:
    return MixtureNames(
        router=f"{layer}.{modules.router}",
        experts=f"{layer}.{modules.experts}",
        expert=ExpertNames(*modules.expert),
        correction=f"{layer}.{modules.correction}",
        shared_up=_within(layer, modules.shared_up),
        shared_down=f"{layer}.{modules.shared_down}",
        shared_gate=f"{layer}.{modules.shared_gate}",
    )


def _within(layer: str, names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{layer}.{name}" for name in names)
