"""The head of a model that makes values of texts."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from quire.compute.kernels.dispatch import kernel
from quire.models.layer_spec import NormSpec
from quire.models.layers.factory import LayerFactory
from quire.models.layers.mlp import PLAIN
from quire.models.layers.norm import LayerNorm, RMSNorm
from quire.models.text_head_spec import HeadStep, TextHead


class _Step(NamedTuple):
    product: Callable[[Tensor], Tensor]
    activate: Callable[[Tensor, Tensor], None] | None
    norm: LayerNorm | RMSNorm | None


class TextHeadLayers:
    """Computes a head's values. Every rank computes all of them, since heads are small.

    Args:
        spec: The head.
        width: The width of the model's states.
        norm: The kind of the model's norms.
        build: Builds the layers.
    """

    def __init__(self, spec: TextHead, width: int, norm: NormSpec, build: LayerFactory) -> None:
        widths = (width, *(step.width for step in spec.steps))
        self._steps = [_step(step, inputs, norm, build) for step, inputs in zip(spec.steps, widths, strict=False)]

    def __call__(self, states: Tensor) -> Tensor:
        """Return the values of states [n, width] → [n, outputs], without their last activation."""
        for product, activate, norm in self._steps:
            states = product(states)
            if activate is not None:
                active = states.new_empty(states.shape)
                activate(states, active)
                states = active
            states = states if norm is None else norm(states)
        return states


def _step(step: HeadStep, inputs: int, norm: NormSpec, build: LayerFactory) -> _Step:
    activation = PLAIN.get(step.activation, step.activation)
    return _Step(
        build.whole(step.name, step.width, inputs, step.bias),
        kernel(activation, build.options.device.type) if activation else None,
        build.stream_norm(step.norm, step.width, norm) if step.norm else None,
    )
