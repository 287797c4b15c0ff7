"""What builds a model's layers, and remembers those with weights.

The one place where tensor parallelism, quantization and adapters enter a model: a model file names its projections and
their shapes, and this decides what serves them.
"""

from __future__ import annotations

from typing import TypeVar

from quire.attention.backend import AttentionLayer
from quire.layers.attention import Attention, Heads
from quire.layers.embedding import Embedding, TiedHead
from quire.layers.layer import Layer
from quire.layers.linear import Linear
from quire.layers.mlp import GATED, MLP, PLAIN
from quire.layers.moe import Experts, MixtureOfExperts, Routing
from quire.layers.norm import RMS, LayerNorm, RMSNorm
from quire.quantization.description import Quantization
from quire.quantization.registry import scheme_of
from quire.quantization.scheme import ExpertNames, ExpertsShape, LinearShape, WeightScheme
from quire.weights.tensor_options import TensorOptions

L = TypeVar("L", bound=Layer)


class LayerFactory:
    """Builds layers whose weights have these options; `layers` lists all that have any, in the order they were built.

    `quantization` says which modules' weights are not dense.

    A `transposed` projection is stored as [in, out].
    """

    def __init__(self, options: TensorOptions, quantization: Quantization | None = None) -> None:
        self.options = options
        self._quantization = quantization
        self.layers: list[Layer] = []

    def column_parallel(
        self, names: tuple[str, ...], rows: tuple[int, ...], columns: int, bias: bool, transposed: bool = False
    ) -> Linear:
        """Projections out of the stream, merged: their outputs can be split over devices."""
        return self._linear(LinearShape(names, rows, columns, transposed), bias)

    def gate_up(
        self, names: tuple[str, ...], rows: tuple[int, ...], columns: int, bias: bool, activation: str
    ) -> Linear:
        """The projections of a gated MLP, as column_parallel."""
        return self._linear(LinearShape(names, rows, columns, gated=GATED[activation] == "silu_and_mul"), bias)

    def row_parallel(self, name: str, rows: int, columns: int, bias: bool, transposed: bool = False) -> Linear:
        """A projection back into the stream: its input can be split over devices, its output is their sum."""
        return self._linear(LinearShape((name,), (rows,), columns, transposed), bias)

    def norm(self, name: str, width: int, kind: RMS) -> RMSNorm:
        """A root mean square norm of the stream."""
        return self._remember(RMSNorm(((name, 0),), width, kind, self.options))

    def head_norm(self, name: str, heads: Heads, kind: RMS) -> RMSNorm:
        """Root mean square norms of queries and keys, head by head."""
        names = ((f"{name}.q_norm", heads.query), (f"{name}.k_norm", heads.kv))
        return self._remember(RMSNorm(names, heads.width, kind, self.options))

    def layer_norm(self, name: str, width: int, eps: float) -> LayerNorm:
        """A layer norm with a bias."""
        return self._remember(LayerNorm(name, width, eps, self.options))

    def embedding(self, name: str, count: int, width: int, scale: float | None = None) -> Embedding:
        """Embeddings of tokens or positions."""
        return self._remember(Embedding(name, count, width, self.options, scale))

    def head(self, name: str, embedding: Embedding | None, vocab_size: int, width: int) -> Linear | TiedHead:
        """The projection to logits; from `embedding`'s weight where one is given."""
        if embedding is not None:
            return TiedHead(embedding, self.options)
        return self._linear(LinearShape((name,), (vocab_size,), width), bias=False)

    def attention(
        self, layer: AttentionLayer, heads: Heads, qkv: Linear, out: Linear, norm: RMSNorm | None = None
    ) -> Attention:
        """A layer's attention between its projections: queries, keys and values side by side, and back."""
        return Attention(layer, heads, qkv, out, norm)

    def gated_mlp(self, gate_up: Linear, down: Linear, width: int, activation: str) -> MLP:
        """An MLP whose first projection gives the gate and, beside it, what it gates."""
        return MLP(gate_up, down, width, GATED[activation], self.options)

    def plain_mlp(self, up: Linear, down: Linear, width: int, activation: str) -> MLP:
        """An MLP without a gate."""
        return MLP(up, down, width, PLAIN[activation], self.options)

    def experts(self, name: str, names: ExpertNames, routing: Routing, hidden: int, width: int) -> MixtureOfExperts:
        """Experts and their router; experts are silu-gated MLPs `width` wide."""
        router = self._linear(LinearShape((f"{name}.gate",), (routing.count,), hidden), bias=False)
        shape = ExpertsShape(f"{name}.experts", names, routing.count, hidden, width)
        experts = self._remember(Experts(shape, self._scheme(*shape.modules), self.options))
        return MixtureOfExperts(router, experts, routing, self.options)

    def _linear(self, shape: LinearShape, bias: bool) -> Linear:
        return self._remember(Linear(shape, bias, self._scheme(*shape.names), self.options))

    def _scheme(self, *names: str) -> WeightScheme:
        """What serves the weights of these modules."""
        return scheme_of(self._quantization.format_of_all(names) if self._quantization else None)

    def _remember(self, layer: L) -> L:
        self.layers.append(layer)
        return layer
