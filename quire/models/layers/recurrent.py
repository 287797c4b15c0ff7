"""Mixers that keep a state of each sequence: gated short convolutions, Mamba2 and gated delta nets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from quire.compute.attention.backend import AttentionBackend
from quire.compute.attention.sequence_states import states_of
from quire.compute.collectives.collectives import Collectives
from quire.compute.collectives.delta import Delta, sum_of
from quire.compute.kernels.dispatch import kernel
from quire.compute.kernels.reference.quantized_rows import Rows
from quire.models.layers.linear import Projection
from quire.models.layers.rotary import Angles
from quire.models.quantization.scheme import RowForm
from quire.models.recurrent_spec import GatedDeltaSpec, LightningSpec, ShortConvSpec
from quire.models.state_space_spec import Mamba2Spec
from quire.models.weights.checkpoint import Checkpoint, WeightSpec
from quire.models.weights.shards import Cut, Shards
from quire.models.weights.tensor_options import TensorOptions


class Mixing(Protocol):
    """A layer through which tokens see one another."""

    row_form: RowForm | None

    def __call__(self, x: Rows, angles: Angles | None, backend: AttentionBackend) -> Delta: ...


class Parameters:
    """The small weights of a recurrent mixer, of which a rank has those of its channels and heads.

    Args:
        specs: The checkpoint's tensors, by what the mixer calls them: `conv` [channels, 1, k], `conv_bias`, `norm`, and
            in fp32 `decay` (the logarithm of a decay's negative, [heads] or [channels, n]), `dt_bias` and `skip`.
        cuts: This rank's part of each tensor's first dimension; what has none is whole.
        options: The device, and the dtype of `conv`, `conv_bias` and `norm`.

    Attributes:
        values: The loaded tensors by the same names; `conv` is [k, channels], and `decay` is the decay itself, [heads]
            or [n, channels].
    """

    _IN_FP32 = ("decay", "dt_bias", "skip")

    def __init__(self, specs: Mapping[str, WeightSpec], cuts: Mapping[str, Cut], options: TensorOptions) -> None:
        self._names = specs
        self._options = options
        own = {name: _own(spec, cuts.get(name)) for name, spec in specs.items()}
        self._own = own
        by_name = {spec.name: cuts.get(name) for name, spec in specs.items()}
        self._shards = Shards(
            specs.values(), own.values(), lambda name: by_name.get(name) or Cut(0, ()), by_tensor=True
        )
        self.values: dict[str, Tensor] = {}

    def weight_specs(self) -> Iterator[WeightSpec]:
        yield from self._shards.specs

    def load_weights(self, checkpoint: Checkpoint) -> None:
        checkpoint = self._shards.of(checkpoint)
        for name, spec in self._own.items():
            dtype = torch.float32 if name in self._IN_FP32 else self._options.dtype
            tensor = torch.empty(spec.shape, dtype=dtype, device=self._options.device)
            stored = checkpoint.contents().get(spec.name)
            checkpoint.read(spec.name, tensor if stored is None else tensor.view(stored.shape))
            if spec.any_rank:
                tensor = tensor.flatten()
            if name == "conv":
                tensor = tensor.flatten(1).T.contiguous()
            self.values[name] = -tensor.movedim(-1, 0).contiguous().exp() if name == "decay" else tensor


def _own(spec: WeightSpec, cut: Cut | None) -> WeightSpec:
    if cut is None:
        return spec
    at = spec.shape.index(cut.whole)
    return replace(spec, shape=(*spec.shape[:at], sum(span.count for span in cut.spans), *spec.shape[at + 1 :]))


@dataclass(frozen=True)
class Products:
    """The projections around a recurrent mixer.

    Attributes:
        number: The layer's number among those that this rank computes.
        into: Projects the input.
        out: Projects the output back into the stream.
    """

    number: int
    into: Projection
    out: Callable[[Tensor], Delta]


class NoMixer:
    """The mixer of a layer that treats each token by itself, which nobody calls."""

    row_form: RowForm | None = None

    def __call__(self, x: Rows, angles: Angles | None, backend: AttentionBackend) -> Delta:
        raise NotImplementedError


class Beside:
    """The sum of two mixers of one input."""

    def __init__(self, first: Mixing, second: Mixing) -> None:
        self.row_form = first.row_form if first.row_form == second.row_form else None
        self._both = first, second

    def __call__(self, x: Rows, angles: Angles | None, backend: AttentionBackend) -> Delta:
        """Compute both: [tokens, hidden] → [tokens, hidden]."""
        first, second = (mixer(x, angles, backend) for mixer in self._both)
        return sum_of(first, second)


class ShortConv:
    """A short convolution whose input and output are gated by projections of the layer's input.

    Args:
        spec: This rank's part of the layer.
        products: The projections; `into` returns the input's gate, the output's and the input side by side.
        parameters: The small weights.
        device: The type of the device.
    """

    def __init__(self, spec: ShortConvSpec, products: Products, parameters: Parameters, device: str) -> None:
        self.row_form = products.into.row_form
        self._channels = spec.channels
        self._products = products
        self._parameters = parameters
        self._short_conv = kernel("short_conv", device)

    def __call__(self, x: Rows, angles: Angles | None, backend: AttentionBackend) -> Delta:
        """Compute the layer: [tokens, hidden] → [tokens, hidden]."""
        projected, values = self._products.into(x), self._parameters.values
        before, after, u = torch.split(projected, self._channels, dim=1)
        kept = states_of(backend)
        (inputs,) = kept.tensors_of(self._products.number)
        out = projected.new_empty((len(projected), self._channels))
        convolve = partial(self._short_conv, silu=False, before=before, after=after)
        kept.run(lambda rows: convolve(u, values["conv"], values.get("conv_bias"), inputs, rows, out))
        return self._products.out(out)


class Mamba2:
    """A selective state space behind a convolution, with a gated norm.

    Args:
        spec: This rank's part of the layer.
        products: The projections; `into` returns the gate, what is convolved, and step sizes side by side.
        parameters: The small weights.
        device: The type of the device.
        sum_squares: Sums of squares over ranks that divide one norm; None: no norm is divided.
    """

    def __init__(
        self, spec: Mamba2Spec, products: Products, parameters: Parameters, device: str, sum_squares: Sum | None
    ) -> None:
        self.row_form = products.into.row_form
        self._spec = spec
        self._products = products
        self._parameters = parameters
        self._sum_squares = sum_squares
        self._multiply = kernel("multiply", device)
        self._short_conv, self._ssd_scan, self._gated_norm = (
            kernel(op, device) for op in ("short_conv", "ssd_scan", "gated_norm")
        )

    def __call__(self, x: Rows, angles: Angles | None, backend: AttentionBackend) -> Delta:
        """Compute the layer: [tokens, hidden] → [tokens, hidden]."""
        spec, values, kept = self._spec, self._parameters.values, states_of(backend)
        inputs, states = kept.tensors_of(self._products.number)
        projected = self._products.into(x)
        gate, xbc, dt = torch.split(projected, [spec.inner, spec.channels, spec.heads], dim=1)
        convolved = projected.new_empty(xbc.shape)
        convolve, scan = partial(self._short_conv, silu=True), partial(self._ssd_scan, dt_bounds=spec.dt_bounds)
        kept.run(lambda rows: convolve(xbc, values["conv"], values.get("conv_bias"), inputs, rows, convolved))
        out = projected.new_empty((len(projected), spec.inner))
        own = values["decay"], values["skip"], values["dt_bias"]
        kept.run(lambda rows: scan(convolved, dt, *own, states, rows, out))
        self._norm(out, gate, values.get("norm"))
        if spec.out_factor != 1.0:
            self._multiply(out, spec.out_factor)
        return self._products.out(out)

    def _norm(self, out: Tensor, gate: Tensor, weight: Tensor | None) -> None:
        spec = self._spec
        group = spec.inner // spec.norm_groups
        if self._sum_squares is None or weight is None:
            self._gated_norm(out, gate, weight, spec.eps, group, out, norm_first=spec.norm_first)
            return
        if not spec.norm_first:
            self._gated_norm(out, gate, None, spec.eps, group, out, norm_first=False)
        self._sum_squares.norm(out, weight, spec.eps)
        if spec.norm_first:
            self._gated_norm(out, gate, None, spec.eps, group, out, norm_first=False)


class Sum:
    """Root mean square norms of rows that ranks divide.

    Args:
        collectives: Operations over these ranks.
        width: The width of the undivided rows.
    """

    def __init__(self, collectives: Collectives, width: int) -> None:
        self._collectives = collectives
        self._width = width

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> None:
        """Norm x [tokens, this rank's width], in place."""
        squares = x.float().square().sum(1, keepdim=True)
        self._collectives.all_reduce(squares)
        x.copy_(x.float() * (squares / self._width + eps).rsqrt() * weight.float())


class Lightning:
    """Linear attention with a fixed decay of each head, whose output is normed over all heads and gated.

    Args:
        spec: This rank's part of the layer.
        products: The projections; `into` returns values, keys and queries of all heads side by side.
        gate: Projects the input to the output's gate.
        rates: [heads] fp32, the logarithms of what a token keeps of each of this rank's states.
        parameters: The small weights.
        device: The type of the device.
        sum_squares: Sums of squares over ranks that divide the norm; None: it is not divided.
    """

    def __init__(
        self,
        spec: LightningSpec,
        products: Products,
        gate: Projection,
        rates: Tensor,
        parameters: Parameters,
        device: str,
        sum_squares: Sum | None,
    ) -> None:
        form = products.into.row_form
        self.row_form = form if form == gate.row_form else None
        self._spec = spec
        self._products = products
        self._gate = gate
        self._rates = rates
        self._zeros = torch.zeros_like(rates)
        self._parameters = parameters
        self._sum_squares = sum_squares
        self._ssd_scan, self._gated_norm = (kernel(op, device) for op in ("ssd_scan", "gated_norm"))

    def __call__(self, x: Rows, angles: Angles | None, backend: AttentionBackend) -> Delta:
        """Compute the layer: [tokens, hidden] → [tokens, hidden]."""
        spec, kept, weight = self._spec, states_of(backend), self._parameters.values["norm"]
        (states,) = kept.tensors_of(self._products.number)
        vkq = torch.nn.functional.silu(self._products.into(x))
        out, steps = vkq.new_empty((len(vkq), spec.inner)), vkq.new_zeros((len(vkq), spec.heads))
        # A selective state space whose steps are all 1, and which skips nothing.
        own = steps, self._rates, self._zeros, self._zeros
        kept.run(lambda rows: self._ssd_scan(vkq, *own, states, rows, out, dt_bounds=(1.0, 1.0)))
        if self._sum_squares is not None:
            self._sum_squares.norm(out, weight, spec.eps)
        normed = weight if self._sum_squares is None else None
        gate = self._gate(x)
        self._gated_norm(out, gate, normed, spec.eps, spec.inner, out, norm_first=True, activation="sigmoid")
        return self._products.out(out)


class GatedDelta:
    """Linear attention by the gated delta rule behind a convolution, with a gated norm of each head.

    Args:
        spec: This rank's part of the layer.
        products: The projections; `into` returns queries, keys, values and the output's gate side by side.
        gates: Projects the input to the rule's β and decays, side by side.
        parameters: The small weights.
        device: The type of the device.
    """

    def __init__(
        self, spec: GatedDeltaSpec, products: Products, gates: Projection, parameters: Parameters, device: str
    ) -> None:
        form = products.into.row_form
        self.row_form = form if form == gates.row_form else None
        self._spec = spec
        self._products = products
        self._gates = gates
        self._parameters = parameters
        self._short_conv, self._gated_delta, self._gated_norm = (
            kernel(op, device) for op in ("short_conv", "gated_delta", "gated_norm")
        )

    def __call__(self, x: Rows, angles: Angles | None, backend: AttentionBackend) -> Delta:
        """Compute the layer: [tokens, hidden] → [tokens, hidden]."""
        spec, values, kept = self._spec, self._parameters.values, states_of(backend)
        inputs, states = kept.tensors_of(self._products.number)
        projected = self._products.into(x)
        qkv, gate = torch.split(projected, [spec.channels, spec.inner], dim=1)
        b, a = torch.split(self._gates(x), spec.values, dim=1)
        convolved = projected.new_empty(qkv.shape)
        convolve, own = partial(self._short_conv, silu=True), (values["decay"], values["dt_bias"])
        kept.run(lambda rows: convolve(qkv, values["conv"], None, inputs, rows, convolved))
        out = projected.new_empty((len(projected), spec.inner))
        rule = partial(self._gated_delta, factor=spec.factor)
        kept.run(lambda rows: rule(convolved, a, b, *own, states, rows, out))
        self._gated_norm(out, gate, values["norm"], spec.eps, spec.value_dim, out, norm_first=True)
        return self._products.out(out)
