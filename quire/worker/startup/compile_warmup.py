"""What a GPU's worker launches before it has weights, so that kernels are compiled while these are read.

A step's kernels depend on the number of its tokens, of its reads, and of its rows of one token, each up to a power of
two, and on whether it has rows of one token, of several, or of both. Here are steps that have every one of these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from quire.layers.factory import LayerFactory
from quire.layers.layer import TensorOptions
from quire.models.model import Model, build_model
from quire.models.spec import ModelSpec
from quire.planning.step_limits import StepLimits
from quire.weights.checkpoint import Stored
from quire.worker.model_runner import ModelRunner
from quire.worker.sampling.sampler import Deferred


def rehearse(runner: ModelRunner, largest: StepLimits, deferred: Deferred = nullcontext) -> None:
    """Launch whatever any step may launch, on rows of the dummy; to be run within `Precompiler.rehearsal`. What only
    some requests need is launched within `deferred`.
    """
    draw = True  # once: draws are the same in every step
    for counts in warmup_steps(largest):
        runner.run_dummies(counts, deferred, draw=draw)
        draw = False


def warmup_steps(largest: StepLimits) -> Iterator[list[int]]:
    """Tokens of each row, step by step; first those whose kernels take longest to compile."""
    for tokens in reversed(_powers_up_to(largest.tokens)):
        yield largest.fewest_rows(tokens)
    for rows in _powers_up_to(largest.rows):
        yield [1] * rows
    for rows in _powers_up_to(min(largest.rows, largest.tokens - 1) - 1):
        yield [1] * rows + [2]


def reduced_model(spec: ModelSpec, options: TensorOptions) -> Model:
    """A model that launches the same kernels with fewer layers, on memory that nobody wrote."""
    layers = layers_of_every_kind(spec)
    factory = LayerFactory(options)
    model = build_model(replace(spec, layers=layers, local=spec.local[:layers], scales=spec.scales[:layers]), factory)
    with torch.inference_mode():
        for layer in factory.layers:
            layer.load_weights(_Unwritten())
    return model


def layers_of_every_kind(spec: ModelSpec) -> int:
    """How many of the first layers show all that there are."""
    with_experts = spec.experts.layers if spec.experts else frozenset()
    kinds = [(local, layer in with_experts) for layer, local in enumerate(spec.local)]
    second = 2  # before the first, nothing is added to the stream
    return min(spec.layers, max(second, *(kinds.index(kind) + 1 for kind in kinds)))


class _Unwritten:
    """A checkpoint of tensors that are left as they are found."""

    def contents(self) -> dict[str, Stored]:
        """Nobody asks."""
        return {}

    def read(self, name: str, out: Tensor, start: Sequence[int] | None = None) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing is open."""


def _powers_up_to(most: int) -> list[int]:
    """1, 2, 4 and so on, and `most`."""
    return sorted({1 << power for power in range(max(0, most).bit_length())} | {most}) if most > 0 else []
