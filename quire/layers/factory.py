"""What builds a model's layers, and remembers those with weights.

The one place where tensor parallelism, quantization and adapters enter a model: a model file names its projections and
their shapes, and this decides what serves them.
"""

from __future__ import annotations

from typing import TypeVar

from quire.layers.attention import Attention, Heads
from quire.layers.embedding import Embedding, TiedHead
from quire.layers.layer import Layer, Place
from quire.layers.linear import Linear
from quire.layers.mlp import MLP
from quire.layers.norm import RMSNorm

L = TypeVar("L", bound=Layer)


class LayerFactory:
    """Builds layers whose weights live at `place`; `layers` lists all that have any, in the order they were built."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.layers: list[Layer] = []

    def column(self, names: tuple[str, ...], rows: tuple[int, ...], columns: int, bias: bool) -> Linear:
        """Projections out of the stream, merged: their outputs can be split over devices."""
        return self._remember(Linear(names, rows, columns, bias, self.place))

    def row(self, name: str, rows: int, columns: int, bias: bool) -> Linear:
        """A projection back into the stream: its input can be split over devices, its output is their sum."""
        return self._remember(Linear((name,), (rows,), columns, bias, self.place))

    def norm(self, name: str, width: int, eps: float) -> RMSNorm:
        """A root mean square norm."""
        return self._remember(RMSNorm(name, width, eps, self.place))

    def embedding(self, name: str, vocab_size: int, width: int) -> Embedding:
        """Token embeddings."""
        return self._remember(Embedding(name, vocab_size, width, self.place))

    def head(self, name: str, embedding: Embedding | None, vocab_size: int, width: int) -> Linear | TiedHead:
        """The projection to logits; from `embedding`'s weight where one is given."""
        if embedding is not None:
            return TiedHead(embedding)
        return self._remember(Linear((name,), (vocab_size,), width, False, self.place))

    def attention(self, name: str, layer: int, hidden: int, heads: Heads, qkv_bias: bool, out_bias: bool) -> Attention:
        """Layer number `layer`'s attention with its projections."""
        q, kv = heads.query * heads.width, heads.kv * heads.width
        names = (f"{name}.q_proj", f"{name}.k_proj", f"{name}.v_proj")
        qkv = self.column(names, (q, kv, kv), hidden, qkv_bias)
        return Attention(layer, heads, qkv, self.row(f"{name}.o_proj", hidden, q, out_bias), self.place)

    def mlp(self, name: str, hidden: int, width: int, activation: str, bias: bool) -> MLP:
        """A gated MLP with its projections."""
        gate_up = self.column((f"{name}.gate_proj", f"{name}.up_proj"), (width, width), hidden, bias)
        down = self.row(f"{name}.down_proj", hidden, width, bias)
        return MLP(gate_up, down, width, activation, self.place)

    def _remember(self, layer: L) -> L:
        self.layers.append(layer)
        return layer
