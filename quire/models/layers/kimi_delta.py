"""A mixer that keeps a state of each head: a gated delta rule in which each element of a key decays by itself."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from quire.compute.attention.backend import AttentionBackend
from quire.compute.attention.sequence_states import states_of
from quire.compute.collectives.delta import Delta
from quire.compute.kernels.dispatch import kernel
from quire.compute.kernels.reference.quantized_rows import Rows
from quire.models.layers.linear import Projection
from quire.models.layers.recurrent import Parameters, Products
from quire.models.layers.rotary import Angles
from quire.models.recurrent_spec import KimiDeltaSpec


@dataclass(frozen=True)
class DeltaGates:
    """What decays, β and the output's gate are made of.

    Attributes:
        product: Projects the input: the latent of decays, that of the gate, and β side by side.
        decays: Projects the latent to what decays each element of this rank's keys; None: it is that.
        gate: Projects the latent to the gate of this rank's outputs; None: it is that.
    """

    product: Projection
    decays: Projection | None = None
    gate: Projection | None = None


class KimiDelta:
    """Linear attention by a gated delta rule of key elements, behind a convolution, with a gated norm of each head.

    Args:
        spec: This rank's part of the layer.
        products: The projections; `into` returns queries, keys and values side by side.
        gates: What decays, β and the output's gate are made of.
        parameters: The small weights.
        device: The type of the device.
    """

    def __init__(
        self, spec: KimiDeltaSpec, products: Products, gates: DeltaGates, parameters: Parameters, device: str
    ) -> None:
        form = products.into.row_form
        self.row_form = form if form == gates.product.row_form else None
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
        qkv = self._products.into(x)
        gates = self._gates
        decays, gate, beta = torch.split(gates.product(x), list(spec.gates), dim=1)
        convolved = qkv.new_empty(qkv.shape)
        convolve = partial(self._short_conv, silu=True)
        kept.run(lambda rows: convolve(qkv, values["conv"], None, inputs, rows, convolved))
        out = qkv.new_empty((len(qkv), spec.inner))
        own = decays if gates.decays is None else gates.decays(decays), beta, values["decay"], values["dt_bias"]
        rule = partial(self._gated_delta, factor=spec.factor, bound=spec.bound)
        kept.run(lambda rows: rule(convolved, *own, states, rows, out))
        gate, norm = gate if gates.gate is None else gates.gate(gate), (values["norm"], spec.eps, spec.value_dim)
        self._gated_norm(out, gate, *norm, out, norm_first=True, activation="sigmoid")
        return self._products.out(out)
