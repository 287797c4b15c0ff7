"""Builds attention, MLPs and experts under the names that a family's checkpoints give them."""

from __future__ import annotations

from torch import Tensor

from quire.compute.attention.backend import AttentionLayer
from quire.compute.kernels.reference.attention_inputs import NormRopeForm, Scores
from quire.models.families.family import ModuleNames
from quire.models.layer_spec import AttentionSpec, HybridSpec, LatentSpec, MixtureSpec, MlpSpec, QKNormSpec
from quire.models.layers.attention import Attention, Heads
from quire.models.layers.cross_attention import CrossAttention
from quire.models.layers.factory import LayerFactory, Outputs
from quire.models.layers.latent_attention import LatentAttention, LatentNames
from quire.models.layers.mixture import MixtureNames, MixtureOfExperts
from quire.models.layers.mlp import MLP
from quire.models.layers.norm import RMS
from quire.models.layers.recurrent import Beside
from quire.models.quantization.scheme import ExpertNames
from quire.models.recurrent import Recurrent, build_recurrent
from quire.models.spec import ModelSpec

Mixing = Attention | LatentAttention | Recurrent | Beside
"""Layers through which tokens see one another."""


def build_mixer(spec: ModelSpec, build: LayerFactory, layer: int) -> Mixing:
    """Build the part of layer number `layer` through which tokens see one another."""
    own, modules, name = spec.layers[layer].mixer, spec.family.modules, spec.layer_name(layer)
    if isinstance(own, HybridSpec):
        return Beside(build_attention(spec, build, layer), build_recurrent(spec, build, layer))
    if isinstance(own, AttentionSpec):
        return build_attention(spec, build, layer)
    if not isinstance(own, LatentSpec):
        return build_recurrent(spec, build, layer)
    query = modules.qkv[0] if own.query_rank is None else modules.query_up
    names = (
        query, modules.query_latent, modules.query_latent_norm, modules.latent, modules.latent_norm, modules.expansion,
        modules.out, modules.gate,
    )  # fmt: skip
    return build.latent_attention(
        attention_layer(spec, build, layer), own, LatentNames(*_within(name, names)), spec.hidden
    )


def build_attention(spec: ModelSpec, build: LayerFactory, layer: int) -> Attention:
    """Build the attention of layer number `layer`; queries, keys and values may be stored one by one or as one
    projection.
    """
    own, modules, name = spec.layers[layer].mixer, spec.family.modules, spec.layer_name(layer)
    assert isinstance(own, AttentionSpec)
    norms = spec.layers[layer].norms
    heads = Heads(own.heads, own.kv_heads, own.head_dim, own.kv_projections, own.value_dim, own.value_scale)
    of_qkv = modules.qkv if own.kv_projections == 2 else modules.qkv[: 1 + own.kv_projections]
    names = _within(name, of_qkv if own.gate is None else (*of_qkv, modules.gate))
    if own.gate is not None and not modules.gate:
        names = (*names[:-1], "")
    norm_names = f"{name}.{modules.query_norm}", f"{name}.{modules.key_norm}"
    kind = RMS(norms.eps, norms.unit_offset)
    inner = Outputs(heads.query, heads.values or heads.width)
    qkv = build.qkv(names, heads, own.inputs, own.qkv_bias, modules.transposed, own.gate, modules.qkv_layout)
    if isinstance(own, HybridSpec):
        counts = (build.part(heads.query).count, *[build.part(heads.kv).count] * 2)
        qkv = build.scaled(qkv, [(n * heads.width, factor) for n, factor in zip(counts, own.factors, strict=True)])
    sinks = build.sinks(f"{name}.{modules.sinks}", own.heads) if own.sinks else None
    return build.attention(
        attention_layer(spec, build, layer, sinks),
        heads,
        qkv,
        build.row_parallel(f"{name}.{modules.out}", spec.hidden, inner, own.out_bias, modules.transposed),
        None if own.qk_norm is None else build.qk_norm(norm_names, heads, own.qk_norm, kind),
        norm_rope_form(own),
        own.gate,
        gate_is_first=not modules.gate,
    )


def build_cross_attention(spec: ModelSpec, build: LayerFactory, layer: int) -> CrossAttention:
    """Build the attention of layer number `layer` to an encoder's states."""
    own, modules, name = spec.layers[layer].cross, spec.family.modules, spec.layer_name(layer)
    assert own is not None
    query = build.column_parallel((f"{name}.{modules.cross_qkv[0]}",), (own.width,), own.hidden, bias=True)
    out = build.row_parallel(f"{name}.{modules.cross_out}", own.hidden, own.width, bias=True)
    return CrossAttention(layer, own, query, out)


def norm_rope_form(own: AttentionSpec) -> NormRopeForm:
    """Return how queries and keys are normed and rotated."""
    norm = own.qk_norm or QKNormSpec()
    interleaved = own.rope is not None and own.rope.interleaved
    stores = own.source is None
    return NormRopeForm(interleaved, norm.kind == "layer", norm.behind_rope, own.clip, own.values, stores)


def attention_layer(spec: ModelSpec, build: LayerFactory, layer: int, sinks: Tensor | None = None) -> AttentionLayer:
    """Return the properties of layer number `layer` that the attention backend needs."""
    own = spec.layers[layer].mixer
    assert isinstance(own, AttentionSpec | LatentSpec)
    scores = Scores(own.scale, own.cap, sinks, build.slopes(own.slopes))
    return AttentionLayer(layer - build.own_layers(len(spec.layers)).start, scores)


def build_mlp(spec: ModelSpec, build: LayerFactory, layer: int) -> MLP | MixtureOfExperts:
    """Build the MLP of layer number `layer`, or its experts; gate and up may be stored one by one or as one
    projection.
    """
    mlp = spec.layers[layer].mlp
    if isinstance(mlp, MixtureSpec):
        return build_experts(mlp, spec, build, layer)
    return build_dense_mlp(mlp, spec, build, layer)


def build_experts(mixture: MixtureSpec, spec: ModelSpec, build: LayerFactory, layer: int) -> MixtureOfExperts:
    """Build experts under the names of layer number `layer`."""
    return build.experts(mixture, _mixture_names(spec.layer_name(layer), spec.family.modules))


def build_dense_mlp(mlp: MlpSpec, spec: ModelSpec, build: LayerFactory, layer: int) -> MLP:
    """Build an MLP under the names of layer number `layer`."""
    modules, name = spec.family.modules, spec.layer_name(layer)
    names, transposed = _within(name, modules.up), modules.transposed
    if mlp.factors:
        up = build.column_parallel(names, (mlp.width,) * 2, mlp.hidden, mlp.bias)
        up = build.scaled(up, [(build.part(mlp.width).count, factor) for factor in mlp.factors])
    elif mlp.gated:
        up = build.gate_up(
            names,
            mlp.width,
            mlp.hidden,
            mlp.bias,
            mlp.activation,
            up_first=modules.up_first,
            limited=mlp.limit is not None,
        )
    else:
        up = build.column_parallel(names, (mlp.width,), mlp.hidden, mlp.bias, transposed)
    down_bias = mlp.bias or mlp.down_bias
    down = build.row_parallel(f"{name}.{modules.down}", mlp.hidden, mlp.width, down_bias, transposed)
    if mlp.gated:
        return build.gated_mlp(up, down, mlp.width, mlp.activation, mlp.limit)
    return build.plain_mlp(f"{name}.{modules.activation}", up, down, mlp.width, mlp.activation)


def norm_names(spec: ModelSpec, layer: int) -> tuple[str, ...]:
    """Return the names of the norms of the stream in layer number `layer`, in the order of their use. Of four, layers
    with norms before attention and MLP have the first two, and those with norms behind them the last two.
    """
    names = spec.family.modules.norms
    own = {"before": names[:2], "behind": names[-2:]}.get(spec.layers[layer].norms.place, names)
    return _within(spec.layer_name(layer), own)


def _mixture_names(layer: str, modules: ModuleNames) -> MixtureNames:
    return MixtureNames(
        router=f"{layer}.{modules.router}",
        experts=f"{layer}.{modules.experts}",
        expert=ExpertNames(*modules.expert),
        correction=f"{layer}.{modules.correction}",
        shared_up=_within(layer, modules.shared_up),
        shared_down=f"{layer}.{modules.shared_down}",
        shared_gate=f"{layer}.{modules.shared_gate}",
        factors=f"{layer}.{modules.expert_factors}",
        latents=(f"{layer}.{modules.expert_latents[0]}", f"{layer}.{modules.expert_latents[1]}"),
    )


def _within(layer: str, names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{layer}.{name}" for name in names)
