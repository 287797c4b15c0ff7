"""A mixture of experts: its router, its experts, and the one that all tokens go to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from quire.compute.collectives.delta import Delta, total_of
from quire.compute.kernels.dispatch import kernel
from quire.compute.kernels.reference.quantized_rows import Rows, UnnormedRow
from quire.compute.kernels.routing import Routing
from quire.compute.mesh import Span
from quire.models.layers.linear import Projection
from quire.models.lora.updates import LowRankUpdate
from quire.models.quantization.dense import dense_specs, read_dense
from quire.models.quantization.scheme import ExpertNames, LinearShape, RowForm
from quire.models.weights.checkpoint import Checkpoint, WeightSpec
from quire.models.weights.tensor_options import TensorOptions


class MixtureNames(NamedTuple):
    """The checkpoint's names of a mixture's modules.

    Attributes:
        router: The projection that chooses experts.
        experts: What the experts' names begin with, before their numbers.
        expert: The projections of one expert.
        correction: The tensor that corrects scores for the choice.
        shared_up: Gate and up of the shared expert; one name: they are stored as one projection.
        shared_down: The output projection of the shared expert.
        shared_gate: The projection whose σ multiplies the shared expert's output.
        factors: The tensor of the factors of experts' weights.
        latents: The projections to what experts read, and of what they write.
    """

    router: str
    experts: str
    expert: ExpertNames = ExpertNames()
    correction: str = ""
    shared_up: tuple[str, ...] = ()
    shared_down: str = ""
    shared_gate: str = ""
    factors: str = ""
    latents: tuple[str, str] = ("", "")


class OfExperts:
    """A number of each expert, fp32: what is added to its score for the choice alone, or the factor of its weights.

    Args:
        name: The name of the checkpoint's tensor.
        experts: The number of experts.
        options: The device.

    Attributes:
        value: [experts], once it is loaded.
    """

    def __init__(self, name: str, experts: int, options: TensorOptions) -> None:
        self._name = name
        self.value = torch.empty((experts,), dtype=torch.float32, device="meta")
        self._device = options.device

    def weight_specs(self) -> Iterator[WeightSpec]:
        yield WeightSpec(self._name, tuple(self.value.shape), any_rank=True)

    def load_weights(self, checkpoint: Checkpoint) -> None:
        self.value = torch.empty(self.value.shape, dtype=torch.float32, device=self._device)
        stored = checkpoint.contents().get(self._name)
        checkpoint.read(self._name, self.value if stored is None else self.value.view(stored.shape))


class RouterLogits:
    """x Wᵀ + b in fp32, for routers whose logits are never rounded to the model's dtype.

    Args:
        shape: The shape of W.
        bias: Whether there is b.
        dtype: The dtype that W is rounded to when it is read.
        options: The device.
        update: What adapters add; None: the model has no adapters.

    Attributes:
        row_form: None: the product takes dense rows only.
    """

    row_form: RowForm | None = None

    def __init__(
        self, shape: LinearShape, bias: bool, dtype: torch.dtype, options: TensorOptions, update: LowRankUpdate | None
    ) -> None:
        self._shape = shape
        self._has_bias = bias
        self._options = replace(options, dtype=dtype)
        self._update = update
        self._pack = kernel("pack_router", options.device.type)
        self._product = kernel("router_logits", options.device.type)
        self._bias: Tensor | None = None

    def weight_specs(self) -> Iterator[WeightSpec]:
        yield from dense_specs(self._shape)
        if self._has_bias:
            yield WeightSpec(f"{self._shape.names[0]}.bias", self._shape.rows)

    def load_weights(self, checkpoint: Checkpoint) -> None:
        shape, options = self._shape, self._options
        self._weight = options.packed_weights.get(
            f"router {shape.names} {shape.rows} × {shape.columns}",
            lambda: self._pack(read_dense(shape, checkpoint, options)),
        )
        if self._has_bias:
            rounded = torch.empty(shape.rows, dtype=options.dtype, device=options.device)
            checkpoint.read(f"{shape.names[0]}.bias", rounded)
            self._bias = rounded.float()

    def __call__(self, x: Rows) -> Tensor:
        """Return the logits: [tokens, hidden] → [tokens, experts] fp32."""
        assert isinstance(x, Tensor)
        logits: Tensor = self._product(x, self._weight, self._bias)
        if self._update is not None and self._update.active:
            added = x.new_zeros(logits.shape)
            self._update.expand(self._update.shrink(x), added)
            logits += added
        return logits


class Router:
    """Chooses each token's experts.

    Args:
        logits: x [tokens, hidden] → [tokens, experts], in the dtype that scores are made of.
        routing: How tokens go to experts.
        options: The device.
        correction: What scores are corrected by, if the routing says so.
        own: The experts that this rank computes; None: all.
        factors: The factors of experts' weights, if the routing says so.

    Attributes:
        logits, routing: As the arguments.
        row_form: The form of rows that `logits` takes in addition to dense ones.
    """

    def __init__(
        self,
        logits: Projection | RouterLogits,
        routing: Routing,
        options: TensorOptions,
        correction: OfExperts | None = None,
        own: Span | None = None,
        factors: OfExperts | None = None,
    ) -> None:
        self.row_form = logits.row_form
        self._dtype = options.dtype
        self._factors = factors
        self.logits = logits
        self.routing = routing
        self._correction = correction
        self._own = (0, None) if own is None else (own.start, own.count)
        self._route = kernel("route", options.device.type)

    @property
    def correction(self) -> Tensor | None:
        """What is added to scores for the choice, [experts] fp32; None: nothing."""
        return None if self._correction is None else self._correction.value

    def __call__(self, x: Rows) -> tuple[Tensor, Tensor]:
        """Return weights, in the model's dtype, and numbers of each token's experts, as the op `route` does."""
        logits = self.logits(x)
        weights, numbers = self._route(logits, self.routing, *self._own, self.correction, self._dtype)
        if self._factors is not None:
            first, count = self._own
            own = self._factors.value[first : None if count is None else first + count]
            weights = weights * own[numbers.clamp(0, len(own) - 1)].to(weights.dtype)
        return weights, numbers


class MixtureOfExperts:
    """Sends each token to a few experts, and sums their outputs by the router's weights.

    Args:
        router: Returns each token's experts.
        experts: Called like `Experts.__call__`.

    Attributes:
        row_form: The router may norm a single row; none are quantized.
    """

    def __init__(self, router: Router, experts: Callable[..., Delta]) -> None:
        form = router.row_form
        self.row_form = form if form is not None and form.norms_one else None
        self._router = router
        self._experts = experts

    def __call__(self, x: Rows, routed: Tensor | None = None) -> Delta:
        """Compute the mixture: [tokens, hidden] → [tokens, hidden]. `routed` is what the router reads; None: x."""
        weights, numbers = self._router(x if routed is None else routed)
        x = x.dense() if isinstance(x, UnnormedRow) else x
        assert isinstance(x, Tensor)
        return self._experts(x, numbers, weights)


class WeightedInput:
    """Experts whose input is multiplied by the router's weight, in place of their output; each token has one expert.

    Args:
        experts: Called like `Experts.__call__`.
    """

    def __init__(self, experts: Callable[..., Tensor]) -> None:
        self._experts = experts

    def __call__(self, x: Tensor, numbers: Tensor, weights: Tensor) -> Tensor:
        """Compute the experts; arguments are those of `Experts.__call__`."""
        return self._experts(x * weights, numbers, torch.ones_like(weights))


class LatentExperts:
    """Experts that read and write a projection of the stream, which all of them share (NVIDIA 2025, "Nemotron 3").

    Args:
        experts: Called like `Experts.__call__`.
        into, out: The projections: [tokens, hidden] → [tokens, latent], and back.
    """

    def __init__(self, experts: Callable[..., Tensor], into: Projection, out: Projection) -> None:
        self._experts = experts
        self._into = into
        self._out = out

    def __call__(self, x: Tensor, numbers: Tensor, weights: Tensor) -> Tensor:
        """Compute the experts; arguments are those of `Experts.__call__`."""
        return self._out(self._experts(self._into(x), numbers, weights))


class BesideSharedExpert:
    """Experts, and one more that all tokens go to; their outputs are added up.

    Args:
        experts: Called like `Experts.__call__`.
        shared: The expert of all tokens: [tokens, hidden] → [tokens, hidden].
        gate: [tokens, hidden] → [tokens, 1]; σ of it multiplies the shared expert's output; None: nothing does.
        factor: Factor of the sum.
        options: The device.
    """

    def __init__(
        self,
        experts: Callable[..., Tensor],
        shared: Callable[[Rows], Delta],
        gate: Projection | None,
        factor: float,
        options: TensorOptions,
    ) -> None:
        self._experts = experts
        self._shared = shared
        self._gate = gate
        self._factor = factor
        self._add_gated = kernel("add_gated", options.device.type)

    def __call__(self, x: Tensor, numbers: Tensor, weights: Tensor) -> Tensor:
        """Compute the sum; arguments are those of `Experts.__call__`."""
        out = self._experts(x, numbers, weights)
        gate = None if self._gate is None else self._gate(x)
        self._add_gated(out, total_of(self._shared(x)), gate, self._factor)
        return out
