"""Self-attention: projections, norms and rotation around an attention backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from quire.compute.attention.backend import AttentionBackend, AttentionLayer
from quire.compute.collectives.delta import Delta
from quire.compute.kernels.reference.attention_inputs import QKNormRope
from quire.compute.kernels.reference.quantized_rows import Rows
from quire.models.layers.linear import Projection
from quire.models.layers.norm import RMSNorm
from quire.models.layers.rotary import Angles


@dataclass(frozen=True)
class Heads:
    """The shape of attention: `query` heads share `kv` heads, each `width` wide."""

    query: int
    kv: int
    width: int


class Attention:
    """One layer's attention; `norm` is the norm of queries and keys, head by head, or None.

    Attributes:
        row_form: The form of quantized rows that the layer takes in addition to dense ones; None: dense rows only.
    """

    def __init__(
        self,
        layer: AttentionLayer,
        heads: Heads,
        qkv: Projection,
        out: Callable[[Tensor], Delta],
        norm: RMSNorm | None,
    ) -> None:
        self.row_form = qkv.row_form
        self._layer = layer
        self._heads = heads
        self._qkv = qkv.pending
        self._out = out
        self._norm = norm

    def __call__(self, x: Rows, angles: Angles | None, backend: AttentionBackend) -> Delta:
        """Compute attention: [tokens, hidden] → [tokens, hidden]; `angles` is None if nothing is rotated."""
        n, q, kv, d = x.shape[0], self._heads.query, self._heads.kv, self._heads.width
        projected = self._qkv(x)
        qkv, update = (projected, None) if isinstance(projected, Tensor) else projected.parts()
        norm, eps = (None, 0.0) if self._norm is None else (self._norm.weight, self._norm.eps)
        cos, sin = (None, None) if angles is None else (angles.cos, angles.sin)
        o = x.new_empty((n, q * d))
        between = QKNormRope(norm, eps, cos, sin, update)
        backend.run(self._layer, qkv.view(n, q + 2 * kv, d), between, o.view(n, q, d))
        return self._out(o)
