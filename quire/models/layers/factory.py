"""Builds a model's layers, and remembers the layers with weights.

Tensor parallelism, quantization and adapters enter a model only here: a model file names its projections and their
shapes, and the factory decides what computes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from quire.compute.attention.backend import AttentionLayer
from quire.compute.collectives.collectives import Collectives, OneRank
from quire.compute.collectives.delta import Delta
from quire.compute.collectives.engine_group import EngineGroup
from quire.compute.kernels.reference.attention_inputs import NormRopeForm
from quire.compute.kernels.routing import Routing
from quire.compute.mesh import Mesh, Span
from quire.models.layer_spec import GateSpec, LatentSpec, MixtureSpec, NormSpec, QKNormSpec, SharedExpert
from quire.models.layers.adapted import AdaptedExperts, AdaptedLinear, SeparatelyAdaptedExperts
from quire.models.layers.attention import Attention, Heads, NarrowAttention, OutputGate
from quire.models.layers.divided import ExpertsOfEngines, GatheredLogits, SummedOverRanks, VocabularyEmbedding
from quire.models.layers.embedding import ChangedLogits, Embedding, TiedHead
from quire.models.layers.latent_attention import LatentAttention, LatentExpansion, LatentNames, LatentQueries
from quire.models.layers.layer import Layer
from quire.models.layers.linear import Linear, Projection, ScaledProjection
from quire.models.layers.mixture import (
    BesideSharedExpert,
    LatentExperts,
    MixtureNames,
    MixtureOfExperts,
    OfExperts,
    Router,
    RouterLogits,
    WeightedInput,
)
from quire.models.layers.mlp import GATED, MLP, PLAIN, XIELU, Experts, LimitedSilu
from quire.models.layers.norm import RMS, LayerNorm, RMSNorm
from quire.models.layers.qk_norm import QKNorm
from quire.models.layers.qkv_layout import QkvLayout, spans_of
from quire.models.layers.sinks import Sinks
from quire.models.lora.updates import LowRankUpdates
from quire.models.quantization.dense import Dense, DenseEmbedding
from quire.models.quantization.formats import Quantization
from quire.models.quantization.gguf import Gguf
from quire.models.quantization.registry import embedding_scheme_of, scheme_of
from quire.models.quantization.scheme import (
    EmbeddingShape,
    ExpertsShape,
    LinearPart,
    LinearShape,
    RowForm,
    WeightScheme,
)
from quire.models.weights.shards import Cut
from quire.models.weights.tensor_options import TensorOptions

L = TypeVar("L", bound=Layer)


class Outputs(NamedTuple):
    """Outputs of a projection that are divided over ranks in `units` (heads, or single outputs), each `width` wide."""

    units: int
    width: int = 1


class LayerFactory:
    """Builds a model's layers; `layers` lists all that have weights, in the order they were built.

    All sizes are of the undivided layers. A `transposed` projection is stored as [in, out].

    Args:
        options: The device and dtype of weights.
        quantization: Says which modules' weights are not dense.
        mesh: This rank's place among the ranks that divide each layer.
        collectives: Operations over these ranks.
        updates: Collects the products that adapters change; None: there are no adapters.
        stand_in: Returns what a model uses in place of a layer: an object with the same methods.
        engines: The engines that divide experts among all their ranks, if the mesh has several.
    """

    def __init__(
        self,
        options: TensorOptions,
        quantization: Quantization | None = None,
        mesh: Mesh | None = None,
        collectives: Collectives | None = None,
        updates: LowRankUpdates | None = None,
        stand_in: Callable[[Layer], Any] | None = None,
        engines: EngineGroup | None = None,
    ) -> None:
        self.options = options
        self._quantization = quantization
        self._mesh = mesh or Mesh()
        self._collectives = collectives or OneRank()
        self._updates = updates
        self._stand_in = stand_in
        self._engines = engines
        self.layers: list[Layer] = []

    @property
    def ranks(self) -> int:
        """How many ranks divide each layer."""
        return self._mesh.tp

    @property
    def collectives(self) -> Collectives:
        """Operations over the ranks that divide each layer."""
        return self._collectives

    def part(self, units: int) -> Span:
        """Return this rank's of `units` that ranks divide."""
        return self._mesh.part(units)

    def own_layers(self, layers: int) -> range:
        """Return the numbers of the layers that this rank computes, in a model with `layers` layers."""
        return self._mesh.own_layers(layers)

    def at(self, *, first: bool = False, last: bool = False) -> LayerFactory:
        """Return this factory if this rank computes the model's first or last layer, as asked.

        On other ranks, return a factory whose layers are only descriptions, which nobody loads or calls.
        """
        if (first and self._mesh.is_first) or (last and self._mesh.is_last):
            return self
        return LayerFactory(self.options, self._quantization, self._mesh, self._collectives)

    def qkv(
        self,
        names: tuple[str, ...],
        heads: Heads,
        columns: int,
        bias: bool,
        transposed: bool = False,
        gate: GateSpec | None = None,
        layout: QkvLayout = "kinds",
    ) -> Projection:
        """Build queries, keys and values as one product, whether stored one by one or as one projection.

        If there are fewer KV heads than ranks, several ranks share one. If attention has a gate, the last name is that
        of its projection, whose outputs come last; if it is empty, the gate of each head is stored behind its query,
        and gates come first.
        """
        if layout == "kinds" and gate is not None and not names[-1]:
            return self._adapted(*self._queries_with_gates(names[:-1], heads, columns, bias))
        if layout != "kinds":
            spans = spans_of(layout, heads, self._mesh.part(heads.query), self._mesh.part(heads.kv))
            cut = Cut((heads.query + 2 * heads.kv) * heads.width, spans)
            whole, own = (LinearShape(names, (rows,), columns) for rows in (cut.whole, _size(cut)))
            return self._adapted(own, bias, LinearPart(whole, {names[0]: cut}))
        of_kv = (Outputs(heads.kv, heads.width), Outputs(heads.kv, heads.values or heads.width))
        parts = (Outputs(heads.query, heads.width), *of_kv[: heads.kv_projections])
        if gate is None:
            return self._column_parallel(names, _by_module(names, parts), columns, bias, transposed=transposed)
        gated = (Outputs(heads.query, 1 if gate.by_head else heads.width),)
        modules = (*_by_module(names[:-1], parts), gated)
        return self._column_parallel(names, modules, columns, bias, transposed=transposed)

    def column_parallel(
        self, names: tuple[str, ...], rows: tuple[int, ...], columns: int, bias: bool, transposed: bool = False
    ) -> Projection:
        """Build projections out of the stream as one product; the outputs of each are divided over ranks."""
        parts = tuple((Outputs(count),) for count in rows)
        return self._column_parallel(names, parts, columns, bias, transposed=transposed)

    def rows_of(self, cuts: Mapping[str, Cut], columns: int, bias: bool) -> Projection:
        """Build projections out of the stream as one product, of whose outputs this rank has these, in their order."""
        names = tuple(cuts)
        whole = LinearShape(names, tuple(cut.whole for cut in cuts.values()), columns)
        own = LinearShape(names, tuple(_size(cut) for cut in cuts.values()), columns)
        return self._adapted(own, bias, LinearPart(whole, dict(cuts)))

    def scaled(self, base: Projection, factors: Sequence[tuple[int, float]]) -> Projection:
        """Return a projection with factors of its outputs: numbers of neighbours, and their factor."""
        return ScaledProjection(base, factors, self.options)

    def gate_up(
        self,
        names: tuple[str, ...],
        width: int,
        columns: int,
        bias: bool,
        activation: str,
        *,
        up_first: bool = False,
        limited: bool = False,
    ) -> Projection:
        """Build the gate and up projections of an MLP `width` wide as one product, however they are stored.

        One projection has gate before up, or up before gate (`up_first`). Where the MLP is `limited`, the activation is
        no part of the product.
        """
        if up_first:
            (name,), own = names, self._mesh.part(width)
            cut = Cut(2 * width, (Span(width + own.start, own.count), own))
            whole, part = (LinearShape(names, (rows,), columns) for rows in (cut.whole, _size(cut)))
            return self._adapted(part, bias, LinearPart(whole, {name: cut}))
        parts = _by_module(names, (Outputs(width), Outputs(width)))
        return self._column_parallel(
            names, parts, columns, bias, gated=GATED[activation] == "silu_and_mul" and not limited
        )

    def whole(self, name: str, rows: int, columns: int, bias: bool) -> Projection:
        """Build a small product that every rank computes whole, and adapters do not change: its rows may be others than
        the step's tokens, whose adapters are known.
        """
        return self._linear(LinearShape((name,), (rows,), columns), bias)

    def slopes(self, slopes: tuple[float, ...]) -> Tensor | None:
        """Return what scores of this rank's heads fall by with each position of distance; None: nothing."""
        if not slopes:
            return None
        own = self._mesh.part(len(slopes))
        return torch.tensor(slopes[own.start : own.start + own.count], dtype=torch.float32, device=self.options.device)

    def row_parallel(
        self,
        name: str,
        rows: int,
        columns: Outputs | int,
        bias: bool,
        transposed: bool = False,
        *,
        is_summed: bool = True,
    ) -> Callable[[Tensor], Delta]:
        """Build a projection back into the stream; its inputs are divided over ranks, and its outputs are summed over
        them, unless the reader sums them (not `is_summed`).
        """
        units, width = columns if isinstance(columns, Outputs) else Outputs(columns)
        whole = LinearShape((name,), (rows,), units * width, transposed)
        if self._mesh.tp == 1:
            return self._adapted(whole, bias).pending
        span = _times(self._mesh.part(units), width)
        own = LinearShape((name,), (rows,), span.count, transposed)
        cuts = {name: Cut(whole.columns, (span,))}
        part = self._adapted(own, bias, LinearPart(whole, cuts, adds_bias=self._mesh.tp_rank == 0))
        return self._summed(part) if is_summed else part.pending

    def stream_norm(self, name: str, width: int, kind: NormSpec, form: RowForm | None = None) -> RMSNorm | LayerNorm:
        """Build a norm of the stream, for a layer that takes rows of this form in addition to dense ones."""
        if kind.kind == "layer":
            return self.remember(LayerNorm(name, width, kind, self.options))
        return self.norm(name, width, RMS(kind.eps, kind.unit_offset, kind.weight), form)

    def norm(self, name: str, width: int, kind: RMS, form: RowForm | None = None) -> RMSNorm:
        """Build a root mean square norm of the stream, for a layer that takes rows of this form in addition to dense
        ones.
        """
        return self.remember(RMSNorm(name, width, kind, self.options, form))

    def qk_norm(self, names: tuple[str, str], heads: Heads, spec: QKNormSpec, kind: RMS) -> QKNorm:
        """Build the norms of queries and keys; `names` are theirs."""
        numbers = (heads.query, heads.kv) if heads.kv_projections else (heads.query,)
        return self.remember(
            QKNorm(names, numbers, heads.width, spec, kind, self.options, self._mesh, self._collectives)
        )

    def embedding(self, name: str, count: int, width: int, scale: float | None = None) -> Embedding:
        """Build embeddings of tokens, whose vocabulary is divided over ranks."""
        shape = EmbeddingShape(name, count, width)
        if self._mesh.tp == 1:
            return self._embedding(shape, scale)
        part = self._mesh.padded_part(count)
        return self.remember(VocabularyEmbedding(shape, part, self.options, self._collectives, scale))

    def positions(self, name: str, count: int, width: int, offset: int = 0) -> Embedding:
        """Build embeddings of positions, the first of which is row `offset` of the `count` stored ones.

        Every rank has all of them, since they are small.
        """
        shape = EmbeddingShape(name, count, width)
        if not offset:
            return self._embedding(shape)
        weight = DenseEmbedding(shape, self.options, Span(offset, count - offset))
        return self.remember(Embedding(weight, width, self.options))

    def head(
        self, name: str, embedding: Embedding | None, vocab_size: int, width: int, bias: bool = False
    ) -> Callable[[Tensor], Tensor]:
        """Build the projection to logits, with the weight of `embedding` if it is not None."""
        if self._mesh.tp == 1:
            return self._head(embedding, LinearShape((name,), (vocab_size,), width), bias)
        span = self._mesh.padded_part(vocab_size)
        part = LinearPart(LinearShape((name,), (vocab_size,), width), {name: Cut(vocab_size, (span,))})
        own = self._head(embedding, LinearShape((name,), (span.count,), width), bias, part)
        return GatheredLogits(own, vocab_size, self._collectives)

    def changed_logits(
        self, head: Callable[[Tensor], Tensor], scale: float | None, cap: float | None
    ) -> Callable[[Tensor], Tensor]:
        """Return the head with logits that are multiplied by `scale` and then bounded by `cap`; None: they are not."""
        return head if scale is None and cap is None else ChangedLogits(head, scale, cap, self.options)

    def attention(
        self,
        layer: AttentionLayer,
        heads: Heads,
        qkv: Projection,
        out: Callable[[Tensor], Delta],
        norm: QKNorm | None = None,
        form: NormRopeForm | None = None,
        gate: GateSpec | None = None,
        *,
        gate_is_first: bool = False,
    ) -> Attention:
        """Build a layer's attention between `qkv`, whose outputs lie side by side, and the output projection.

        Args:
            layer: The layer.
            heads: The numbers and width of heads.
            qkv: The projection of queries, keys and values, and of the gate if there is one.
            out: The output projection.
            norm: The norms of queries and keys; None: they are not normed.
            form: How queries and keys are normed and rotated; None: as in Llama.
            gate: The gate of the output; None: there is no gate.
            gate_is_first: Whether `qkv` returns the gate before queries instead of behind values.
        """
        gated = None if gate is None else OutputGate(gate, self.options.device.type, is_first=gate_is_first)
        kind = Attention if heads.values is None else NarrowAttention
        return kind(layer, self._own_heads(heads), qkv, out, norm, form or NormRopeForm(), gated)

    def latent_attention(
        self, layer: AttentionLayer, spec: LatentSpec, names: LatentNames, width: int
    ) -> LatentAttention:
        """Build a layer's attention over latents, in a stream of this width. Every rank has the whole latents."""
        part, rows = self._mesh.part(spec.heads), spec.heads * spec.head_dim
        queries = self.column_parallel((names.query,), (rows,), spec.query_rank or spec.inputs, bias=False)
        through = None
        if spec.query_rank is not None:
            down = self._adapted(LinearShape((names.query_latent,), (spec.query_rank,), spec.inputs), spec.bias)
            through = LatentQueries(down, self.norm(names.query_norm, spec.query_rank, RMS(spec.eps)), queries)
        expansion = LatentExpansion(names.expansion, spec, part, self._scheme(names.expansion), self.options)
        gate = gated = None
        if spec.gate is not None:
            gate = self.column_parallel((names.gate,), (spec.heads,), spec.inputs, bias=False)
            gated = OutputGate(spec.gate, self.options.device.type)
        return LatentAttention(
            layer,
            replace(spec, heads=part.count),
            through or queries,
            self._adapted(LinearShape((names.latent,), (spec.cached_width,), spec.inputs), spec.bias),
            self.norm(names.latent_norm, spec.rank, RMS(spec.eps)),
            self.remember(expansion),
            self.row_parallel(names.out, width, Outputs(spec.heads, spec.value_dim), spec.bias),
            gate,
            gated,
            device=self.options.device.type,
        )

    def gated_mlp(
        self,
        gate_up: Projection,
        down: Callable[[Tensor], Delta],
        width: int,
        activation: str,
        limit: float | None = None,
    ) -> MLP:
        """Build an MLP with a gate; `gate_up` returns gate and up, side by side."""
        own = self._mesh.part(width).count
        if limit is None:
            return MLP(gate_up, down, own, GATED[activation], self.options)
        return MLP(gate_up, down, own, "limited", self.options, LimitedSilu(limit))

    def plain_mlp(self, name: str, up: Projection, down: Callable[[Tensor], Delta], width: int, activation: str) -> MLP:
        """Build an MLP without a gate; the parameters of an activation that has some have names behind `name`."""
        own = self._mesh.part(width).count
        if activation == "xielu":
            return MLP(up, down, own, activation, self.options, self.remember(XIELU(name, self.options)))
        return MLP(up, down, own, PLAIN[activation], self.options)

    def sinks(self, name: str, heads: int) -> Tensor:
        """Build the scores that the softmaxes of query heads start with; return this rank's, which are loaded later."""
        layer = Sinks(name, heads, self._mesh.part(heads), self.options)
        self.layers.append(layer)
        return layer.values

    def experts(self, spec: MixtureSpec, names: MixtureNames) -> MixtureOfExperts:
        """Build experts and their router. A rank has some experts, or a part of each."""
        routing = spec.routing
        product = self._router(LinearShape((names.router,), (spec.count,), spec.hidden), routing)
        correction = OfExperts(names.correction, spec.count, self.options) if routing.correction else None
        factors = OfExperts(names.factors, spec.count, self.options) if routing.scaled else None
        self.layers += [each for each in (correction, factors) if each is not None]
        sizes = (spec.count, spec.expert_inputs, spec.width)
        whole = ExpertsShape(names.experts, names.expert, *sizes, activation=spec.activation, biases=spec.biases)
        chosen_here = self._mesh.own_experts(spec.count) if self._mesh.ep > 1 and self._engines is None else None
        # The router is small, so every rank has all of it.
        router = Router(product, routing, self.options, correction, chosen_here, factors)
        experts = self._divided_experts(whole, routing.chosen)
        if routing.on_input:
            experts = WeightedInput(experts)
        if spec.latent:  # whole on every rank: of a rank's part of the sum, it makes a part of the projection's
            into, out = (
                self._adapted(LinearShape((name,), (rows,), columns), bias=False)
                for name, rows, columns in zip(
                    names.latents, (spec.latent, spec.hidden), (spec.hidden, spec.latent), strict=True
                )
            )
            experts = LatentExperts(experts, into, out)
        if spec.shared is not None:
            experts = self._beside_shared(experts, spec.shared, names)
        is_whole = self._mesh.tp == 1 or self._engines is not None
        return MixtureOfExperts(router, experts if is_whole else self._summed(experts))

    def remember(self, layer: L) -> L:
        """Remember a layer with weights, and return what the model uses in its place."""
        self.layers.append(layer)
        used: L = layer if self._stand_in is None else self._stand_in(layer)
        return used

    def _divided_experts(self, whole: ExpertsShape, chosen: int) -> Callable[..., Tensor]:
        scheme = self._scheme(*whole.modules)
        if self._mesh.ep == 1:
            is_whole = self._mesh.tp == 1
            return self._adapted_experts(whole, scheme) if is_whole else self._part_of_experts(whole, scheme)
        own = self._mesh.own_experts(whole.count)
        experts = self._own_experts(whole, own, scheme)
        if self._engines is None:
            return experts
        return ExpertsOfEngines(experts, own, whole, chosen, self.options, self._engines)

    def _beside_shared(
        self, experts: Callable[..., Tensor], spec: SharedExpert, names: MixtureNames
    ) -> BesideSharedExpert:
        """Build the expert of all tokens; a sum over ranks that is made of the others has its own in it."""
        mlp, is_summed = spec.mlp, self._engines is not None
        if mlp.gated:
            limited = mlp.limit is not None
            up = self.gate_up(names.shared_up, mlp.width, mlp.hidden, mlp.bias, mlp.activation, limited=limited)
        else:
            up = self.column_parallel(names.shared_up, (mlp.width,), mlp.hidden, mlp.bias)
        down = self.row_parallel(names.shared_down, mlp.hidden, mlp.width, mlp.bias, is_summed=is_summed)
        gate = self._adapted(LinearShape((names.shared_gate,), (1,), mlp.hidden), bias=False) if spec.gated else None
        build = partial(self.gated_mlp, limit=mlp.limit) if mlp.gated else partial(self.plain_mlp, "")
        shared = build(up, down, mlp.width, mlp.activation)
        return BesideSharedExpert(experts, shared, gate, spec.factor, self.options)

    def _adapted_experts(
        self, shape: ExpertsShape, scheme: WeightScheme, whole: ExpertsShape | None = None, cut: Cut | None = None
    ) -> Callable[..., Tensor]:
        """Build experts that adapters may change, if this device can add updates to the form of their weights."""
        base = Experts(shape, scheme, self.options, whole, cut)
        used = self.remember(base)
        if self._updates is None:
            return used
        if self._updates.device == "cpu":
            if base.separate is None:
                return used
            updates = self._updates.updates_of_experts(shape, whole, cut)
            return SeparatelyAdaptedExperts(used, base.separate, updates, shape.activation)
        if base.adaptable is None:
            return used
        return AdaptedExperts(used, base.adaptable, self._updates.updates_of_experts(shape, whole, cut))

    def _own_experts(self, whole: ExpertsShape, own: Span, scheme: WeightScheme) -> Callable[..., Tensor]:
        shape = replace(whole, first=own.start, count=own.count, others=whole.count - own.count)
        return self._adapted_experts(shape, scheme, whole)

    def _part_of_experts(self, whole: ExpertsShape, scheme: WeightScheme) -> Callable[..., Tensor]:
        span = self._mesh.part(whole.width)
        own = replace(whole, width=span.count, adds_bias=self._mesh.tp_rank == 0)
        return self._adapted_experts(own, scheme, whole, Cut(whole.width, (span,)))

    def _queries_with_gates(
        self, names: tuple[str, ...], heads: Heads, columns: int, bias: bool
    ) -> tuple[LinearShape, bool, LinearPart]:
        d, query, kv = heads.width, self._mesh.part(heads.query), _times(self._mesh.part(heads.kv), heads.width)
        own = range(query.start, query.start + query.count)
        spans = tuple(Span((2 * head + is_gate) * d, d) for is_gate in (1, 0) for head in own)
        parts = Cut(2 * heads.query * d, spans), *(Cut(heads.kv * d, (kv,)) for _ in names[1:])
        cuts = dict(zip(names, parts, strict=True))
        whole = LinearShape(names, tuple(cut.whole for cut in parts), columns)
        return LinearShape(names, tuple(map(_size, parts)), columns), bias, LinearPart(whole, cuts)

    def _own_heads(self, heads: Heads) -> Heads:
        return replace(heads, query=self._mesh.part(heads.query).count, kv=self._mesh.part(heads.kv).count)

    def _column_parallel(
        self,
        names: tuple[str, ...],
        parts: tuple[tuple[Outputs, ...], ...],
        columns: int,
        bias: bool,
        *,
        transposed: bool = False,
        gated: bool = False,
    ) -> Projection:
        """Build projections as one product; all parts of each are divided alike."""
        rows = tuple(sum(units * width for units, width in module) for module in parts)
        gated = gated and self._updates is None
        whole = LinearShape(names, rows, columns, transposed, gated)
        if self._mesh.tp == 1:
            return self._adapted(whole, bias)
        cuts = {name: self._cut(module) for name, module in zip(names, parts, strict=True)}
        own = LinearShape(names, tuple(_size(cuts[name]) for name in names), columns, transposed, gated)
        return self._adapted(own, bias, LinearPart(whole, cuts))

    def _cut(self, parts: tuple[Outputs, ...]) -> Cut:
        """Return this rank's outputs of a module that has these parts side by side."""
        spans, begin = [], 0
        for units, width in parts:
            span = _times(self._mesh.part(units), width)
            spans.append(Span(begin + span.start, span.count))
            begin += units * width
        return Cut(begin, tuple(spans))

    def _head(
        self, embedding: Embedding | None, shape: LinearShape, bias: bool, part: LinearPart | None = None
    ) -> Callable[[Tensor], Tensor]:
        return self._linear(shape, bias, part) if embedding is None else TiedHead(embedding)

    def _embedding(self, shape: EmbeddingShape, scale: float | None = None) -> Embedding:
        scheme = embedding_scheme_of(self._quantization.format_of(shape.name) if self._quantization else None)
        return self.remember(Embedding(scheme.embedding(shape, self.options), shape.width, self.options, scale))

    def _linear(self, shape: LinearShape, bias: bool, part: LinearPart | None = None) -> Linear:
        return self.remember(Linear(shape, bias, self._scheme(*shape.names), self.options, part))

    def _adapted(self, shape: LinearShape, bias: bool, part: LinearPart | None = None) -> Projection:
        """Build a product that adapters may change."""
        base = self._linear(shape, bias, part)
        if self._updates is None:
            return base
        return AdaptedLinear(base, self._updates.update_of(shape, part))

    def _router(self, shape: LinearShape, routing: Routing) -> Projection | RouterLogits:
        """Build the product of a router. Codes are multiplied in the model's dtype, whatever the routing says."""
        if not routing.fp32 or not isinstance(self._scheme(*shape.names), Dense | Gguf):
            return self._adapted(shape, routing.bias)
        dtype = torch.float32 if routing.fp32 == "weight" else self.options.dtype
        update = None if self._updates is None else self._updates.update_of(shape)
        return self.remember(RouterLogits(shape, routing.bias, dtype, self.options, update))

    def _summed(self, layer: Callable[..., Tensor]) -> SummedOverRanks:
        return SummedOverRanks(layer, self._collectives)

    def _scheme(self, *names: str) -> WeightScheme:
        return scheme_of(self._quantization.format_of_all(names) if self._quantization else None)


def _by_module(names: tuple[str, ...], parts: tuple[Outputs, ...]) -> tuple[tuple[Outputs, ...], ...]:
    """Divide the parts by module: one part each, or all parts of a single module."""
    return (parts,) if len(names) == 1 else tuple((part,) for part in parts)


def _times(span: Span, width: int) -> Span:
    return Span(span.start * width, span.count * width)


def _size(cut: Cut) -> int:
    return sum(span.count for span in cut.spans)
