"""Attention over latents (MLA; DeepSeek-AI 2024, "DeepSeek-V2", section 2.1), in its absorbed form.

What makes keys of latents is multiplied into queries, and what makes values of them into sums. So the latents
themselves are the keys and values of one head that all query heads share, for one token or many, cached or not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from quire.compute.attention.backend import AttentionBackend, AttentionLayer
from quire.compute.collectives.delta import Delta
from quire.compute.kernels.dispatch import kernel
from quire.compute.kernels.reference.attention_inputs import NormRopeForm, QKNormRope
from quire.compute.kernels.reference.quantized_rows import Rows
from quire.compute.mesh import Span
from quire.errors import CheckpointError
from quire.models.layer_spec import LatentSpec
from quire.models.layers.attention import OutputGate
from quire.models.layers.linear import Projection
from quire.models.layers.norm import RMSNorm
from quire.models.layers.rotary import Angles
from quire.models.quantization.scheme import DenseValues, LinearShape, WeightScheme
from quire.models.weights.checkpoint import Checkpoint, WeightSpec
from quire.models.weights.shards import Cut, Shards
from quire.models.weights.tensor_options import TensorOptions


class LatentNames(NamedTuple):
    """The checkpoint's names of the modules of attention over latents.

    Attributes:
        query: The projection of the input, or of its latent, to queries.
        query_latent, query_norm: The projection of the input to the latent of queries, and its norm.
        latent, latent_norm: The projection of the input to the latent of keys and values and the shared part of keys,
            and the latent's norm.
        expansion: The projection of latents to keys and values.
        out: The output projection.
        gate: The projection of the input to the gate of each head's output.
    """

    query: str
    query_latent: str
    query_norm: str
    latent: str
    latent_norm: str
    expansion: str
    out: str
    gate: str = ""


class LatentExpansion:
    """What makes keys and values of latents, head by head.

    Args:
        name: The name of the checkpoint's module.
        spec: The undivided layer.
        part: This rank's heads.
        scheme: The form of the stored weight.
        options: The device and dtype of the weight's values.

    Raises:
        CheckpointError: The values of weights of this form cannot be had.
    """

    def __init__(self, name: str, spec: LatentSpec, part: Span, scheme: WeightScheme, options: TensorOptions) -> None:
        each = spec.nope + spec.value_dim
        own, whole = (
            scheme.linear(LinearShape((name,), (heads * each,), spec.rank), options)
            for heads in (part.count, spec.heads)
        )
        if not isinstance(own, DenseValues):
            raise CheckpointError(
                f"{name} is quantized in a form that is not supported for latents: give a checkpoint in which it is "
                "dense or fp8.",
                param="quantization",
            )
        cut = Cut(spec.heads * each, (Span(part.start * each, part.count * each),))
        undivided = part.count == spec.heads
        self._shards = Shards(whole.weight_specs(), None if undivided else own.weight_specs(), lambda _: cut)
        self._weight: DenseValues = own
        self._shape = part.count, each, spec.rank
        self._nope = spec.nope
        self._products = kernel("head_products", options.device.type)
        self._keys: Tensor
        self._values: Tensor

    def weight_specs(self) -> Iterator[WeightSpec]:
        yield from self._shards.specs

    def load_weights(self, checkpoint: Checkpoint) -> None:
        weight = self._weight.read_values(self._shards.of(checkpoint)).view(self._shape)
        keys, values = torch.split(weight, [self._nope, self._shape[1] - self._nope], 1)
        self._keys, self._values = keys, values.transpose(1, 2)  # [heads, nope, rank], [heads, rank, values]

    def absorb(self, queries: Tensor, out: Tensor) -> None:
        """Multiply queries with what makes keys: [tokens, heads, nope] → out [tokens, heads, rank]."""
        self._products(queries, self._keys, out)

    def expand(self, sums: Tensor) -> Tensor:
        """Make sums of values of sums of latents: [tokens, heads, rank] → [tokens, heads · values]."""
        out = sums.new_empty((*sums.shape[:2], self._values.shape[2]))
        self._products(sums, self._values, out)
        return out.flatten(1)


class LatentQueries:
    """The projection of the input to queries through a latent, which is normed.

    Args:
        down: Projects the input to the latent.
        norm: The latent's norm.
        up: Projects the latent to queries.
    """

    def __init__(self, down: Projection, norm: RMSNorm, up: Projection) -> None:
        self.row_form = down.row_form
        self._down = down
        self._norm = norm
        self._up = up

    def __call__(self, x: Rows) -> Tensor:
        return self._up(self._norm(self._down(x)))


class LatentAttention:
    """One layer's attention over latents.

    Args:
        layer: What distinguishes the layer for the backend.
        spec: This rank's part of the layer.
        queries: Projects the input to queries, whose rotated parts come last.
        latent: Projects the input to a latent and the shared part of keys.
        norm: The latent's norm.
        expansion: What makes keys and values of latents.
        out: Projects the output back into the stream.
        gate: Projects the input to the gate of each head's output; None: there is no gate.
        gated: Gates the output.
        device: The type of the device.

    Attributes:
        row_form: The form of quantized rows that the layer takes in addition to dense ones; None: dense rows only.
    """

    def __init__(
        self,
        layer: AttentionLayer,
        spec: LatentSpec,
        queries: Projection | LatentQueries,
        latent: Projection,
        norm: RMSNorm,
        expansion: LatentExpansion,
        out: Callable[[Tensor], Delta],
        gate: Projection | None = None,
        gated: OutputGate | None = None,
        *,
        device: str,
    ) -> None:
        self.row_form = queries.row_form if queries.row_form == latent.row_form and gate is None else None
        self._gate = gate
        self._gated = gated
        self._layer = layer
        self._spec = spec
        self._queries = queries
        self._latent = latent
        self._norm = norm
        self._expansion = expansion
        self._out = out
        self._inputs = kernel("latent_inputs", device)
        self._form = NormRopeForm(interleaved=spec.rope is not None and spec.rope.interleaved)

    def __call__(self, x: Rows, angles: Angles | None, backend: AttentionBackend) -> Delta:
        """Compute attention: [tokens, hidden] → [tokens, hidden]; `angles` is None if nothing is rotated."""
        spec, n = self._spec, x.shape[0]
        heads, rotated = spec.heads, spec.rotated
        q = self._queries(x).view(n, heads, spec.head_dim)
        latent = self._latent(x)
        qk = q.new_empty((n, heads + 1, spec.cached_width))  # in front, what is rotated
        self._inputs(q, latent, self._norm.weight, self._norm.eps, qk)
        self._expansion.absorb(q[..., : spec.nope], qk[:, :heads, rotated:])
        cos, sin, scale = (None, None, None) if angles is None else (angles.cos, angles.sin, angles.query_scale)
        sums = q.new_empty((n, heads, spec.cached_width))
        backend.run(self._layer, qk, QKNormRope(cos=cos, sin=sin, form=self._form, query_scale=scale), sums)
        expanded = self._expansion.expand(sums[..., rotated:])
        if self._gate is not None and self._gated is not None:
            self._gated(expanded.view(n, heads, spec.value_dim), self._gate(x))
        return self._out(expanded)
