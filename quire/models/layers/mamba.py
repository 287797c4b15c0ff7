"""A mixer that keeps a state of each channel: the selective state space of Mamba."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from quire.compute.attention.backend import AttentionBackend
from quire.compute.attention.sequence_states import states_of
from quire.compute.collectives.delta import Delta, total_of
from quire.compute.kernels.dispatch import kernel
from quire.compute.kernels.reference.quantized_rows import Rows
from quire.models.layers.linear import Projection
from quire.models.layers.norm import RMSNorm
from quire.models.layers.recurrent import Parameters, Products
from quire.models.layers.rotary import Angles
from quire.models.state_space_spec import MambaSpec


@dataclass(frozen=True)
class Selection:
    """What step sizes, and the inputs and outputs of states are made of.

    Attributes:
        product: Projects this rank's channels, and sums over ranks: the step sizes' latent, b and c side by side.
        norms: The norms of these three; empty: they are not normed.
        steps: Projects the latent to this rank's step sizes.
    """

    product: Callable[[Tensor], Delta]
    norms: tuple[RMSNorm, ...]
    steps: Projection


class Mamba:
    """A selective state space of each channel behind a convolution, with a gated output.

    Args:
        spec: This rank's part of the layer.
        products: The projections; `into` returns what is convolved and the gate side by side.
        selection: What step sizes, and the inputs and outputs of states are made of.
        parameters: The small weights.
        device: The type of the device.
    """

    def __init__(
        self, spec: MambaSpec, products: Products, selection: Selection, parameters: Parameters, device: str
    ) -> None:
        self.row_form = products.into.row_form
        self._spec = spec
        self._products = products
        self._selection = selection
        self._parameters = parameters
        self._short_conv, self._selective_scan, self._gated_norm = (
            kernel(op, device) for op in ("short_conv", "selective_scan", "gated_norm")
        )

    def __call__(self, x: Rows, angles: Angles | None, backend: AttentionBackend) -> Delta:
        """Compute the layer: [tokens, hidden] → [tokens, hidden]."""
        spec, values, kept = self._spec, self._parameters.values, states_of(backend)
        inputs, states = kept.tensors_of(self._products.number)
        projected = self._products.into(x)
        u, gate = torch.split(projected, spec.channels, dim=1)
        convolved = projected.new_empty(u.shape)
        convolve = partial(self._short_conv, silu=True)
        kept.run(lambda rows: convolve(u, values["conv"], values.get("conv_bias"), inputs, rows, convolved))
        latent, b, c = torch.split(total_of(self._selection.product(convolved)), list(spec.selected), dim=1)
        if self._selection.norms:
            latent, b, c = (
                norm(each.contiguous()) for norm, each in zip(self._selection.norms, (latent, b, c), strict=True)
            )
        out = projected.new_empty(u.shape)
        own = self._selection.steps(latent), b, c, values["decay"], values["skip"], values["dt_bias"]
        kept.run(lambda rows: self._selective_scan(convolved, *own, states, rows, out))
        self._gated_norm(out, gate, None, spec.eps, spec.channels, out, norm_first=False)
        return self._products.out(out)
