"""Self-attention: projections, norms and rotation around an attention backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from quire.compute.attention.backend import AttentionBackend, AttentionLayer
from quire.compute.collectives.delta import Delta
from quire.compute.kernels.dispatch import kernel
from quire.compute.kernels.reference.attention_inputs import NormRopeForm, QKNormRope
from quire.compute.kernels.reference.lora import RowUpdate
from quire.compute.kernels.reference.quantized_rows import Rows
from quire.models.layer_spec import GateSpec
from quire.models.layers.linear import Projection
from quire.models.layers.qk_norm import QKNorm
from quire.models.layers.rotary import Angles


@dataclass(frozen=True)
class Heads:
    """The shape of attention: `query` heads share `kv` heads, each `width` wide.

    `kv_projections` is how many projections keys and values have: one each, one for both, or none. Projected values
    have `values` elements, if these are fewer, and are multiplied by `value_scale`.
    """

    query: int
    kv: int
    width: int
    kv_projections: int = 2
    values: int | None = None
    value_scale: float = 1.0

    @property
    def projected(self) -> int:
        """Number of heads of queries, keys and values that are projected."""
        return self.query + self.kv_projections * self.kv


class OutputGate:
    """Gates attention's output, in place.

    Args:
        spec: The kind of the gate.
        device: The type of the device.
        is_first: Whether gates lie before queries instead of behind values.
    """

    def __init__(self, spec: GateSpec, device: str, *, is_first: bool = False) -> None:
        self._spec = spec
        self.is_first = is_first
        self._gate_heads = kernel("gate_heads", device)

    def __call__(self, x: Tensor, gate: Tensor) -> None:
        """Multiply x [tokens, heads, width] by the gate [tokens, heads or heads · width] behind its activation."""
        self._gate_heads(x, gate.view(*x.shape[:2], 1 if self._spec.by_head else x.shape[2]), self._spec.activation)


class Attention:
    """One layer's attention.

    Args:
        layer: What distinguishes the layer for the backend.
        heads: The numbers and width of this rank's heads.
        qkv: Projects the input to queries, keys and values, and behind them to the output's gate.
        out: Projects the output back into the stream.
        norm: The norms of queries and keys; None: they are not normed.
        form: How queries and keys are normed and rotated.
        gate: Gates the output; None: there is no gate.

    Attributes:
        row_form: The form of quantized rows that the layer takes in addition to dense ones; None: dense rows only.
    """

    def __init__(
        self,
        layer: AttentionLayer,
        heads: Heads,
        qkv: Projection,
        out: Callable[[Tensor], Delta],
        norm: QKNorm | None,
        form: NormRopeForm,
        gate: OutputGate | None,
    ) -> None:
        self.row_form = qkv.row_form
        self._layer = layer
        self._heads = heads
        # Before the op that adds updates, something reads what is projected.
        is_read_before = gate is not None or (norm is not None and norm.whole) or heads.values is not None
        self._qkv = qkv if is_read_before else qkv.pending
        self._out = out
        self._norm = norm
        self._form = form
        self._gate = gate

    def __call__(self, x: Rows, angles: Angles | None, backend: AttentionBackend) -> Delta:
        """Compute attention: [tokens, hidden] → [tokens, hidden]; `angles` is None if nothing is rotated."""
        n, q, d, heads = x.shape[0], self._heads.query, self._heads.width, self._heads.projected
        projected = self._qkv(x)
        qkv, update = (projected, None) if isinstance(projected, Tensor) else projected.parts()
        gated = qkv
        if self._gate is not None:
            at = q * d if self._gate.is_first else heads * d
            first, last = qkv[:, :at], qkv[:, at:]
            qkv, gated = (last, first) if self._gate.is_first else (first, last)
        qkv = qkv.view(n, heads, d)
        o = x.new_empty((n, q * d))
        backend.run(self._layer, qkv, self._between(qkv, angles, update), o.view(n, q, d))
        if self._gate is not None:
            self._gate(o.view(n, q, d), gated)
        return self._out(o)

    def _between(self, qkv: Tensor, angles: Angles | None, update: RowUpdate | None) -> QKNormRope:
        """Return the processing of queries and keys before attention."""
        cos, sin, scale = (None, None, None) if angles is None else (angles.cos, angles.sin, angles.query_scale)
        norm = self._norm
        if norm is None:
            return QKNormRope(None, 0.0, cos, sin, update, self._form, None, None, scale)
        squares = norm.mean_squares(qkv) if norm.whole else None
        return QKNormRope(norm.weight, norm.eps, cos, sin, update, self._form, norm.bias, squares, scale)


class NarrowAttention(Attention):
    """One layer's attention with values that are narrower than keys. Behind them stand zeros, in the cache too, so that
    values are as wide as keys."""

    def __call__(self, x: Rows, angles: Angles | None, backend: AttentionBackend) -> Delta:
        n, q, kv, d = x.shape[0], self._heads.query, self._heads.kv, self._heads.width
        projected = self._qkv(x)
        assert isinstance(projected, Tensor) and self._heads.values is not None and self._gate is None
        keys, width = (q + kv) * d, self._heads.values
        qkv = projected.new_zeros((n, q + 2 * kv, d))
        qkv[:, : q + kv] = projected[:, :keys].view(n, q + kv, d)
        qkv[:, q + kv :, :width] = projected[:, keys:].view(n, kv, width) * self._heads.value_scale
        o = x.new_empty((n, q, d))
        backend.run(self._layer, qkv, self._between(qkv, angles, None), o)
        return self._out(o[..., :width].reshape(n, q * width))
