"""Compile warm-up: a GPU worker launches every kernel before it reads weights, so that they are compiled meanwhile.

A step's kernels depend on its tokens, sampled positions and rows of one token, each rounded up to a power of two, and
on whether it has rows of one token, of several, or both. The steps of this module cover all combinations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from quire.compute.collectives.collectives import Collectives
from quire.compute.collectives.delta import NO_LINKS, StageLinks
from quire.compute.mesh import Mesh
from quire.models.layers.factory import LayerFactory
from quire.models.lora.updates import LowRankUpdates
from quire.models.model import Model, build_model
from quire.models.spec import ModelSpec
from quire.models.weights.checkpoint import StoredTensor
from quire.models.weights.tensor_options import TensorOptions
from quire.planning.step_limits import StepLimits
from quire.runtime.worker.graph_shapes import MAX_SHORT_TOKENS
from quire.runtime.worker.sampling.sampler import Deferred
from quire.runtime.worker.startup.starting_runner import StartingRunner


def launch_all_kernels(runner: StartingRunner, limits: StepLimits, deferred: Deferred = nullcontext) -> None:
    """Launch every kernel that a step may need on dummy rows, with the precompiler in place of the device. Kernels that
    only some requests need are launched inside `deferred`."""
    for number, counts in enumerate(warmup_steps(limits)):
        runner.run_dummies(counts, deferred, sample=number == 0)  # sampling is the same in every step


def warmup_steps(limits: StepLimits) -> Iterator[list[int]]:
    """Yield the token counts of each warm-up step's rows. Steps whose kernels take longest to compile come first."""
    for tokens in reversed(_powers_up_to(limits.tokens)):
        yield limits.fewest_rows(tokens)
    for rows in _powers_up_to(max(limits.rows, MAX_SHORT_TOKENS) if limits.drafts else limits.rows):
        yield [1] * rows
    for rows in _powers_up_to(min(limits.rows, limits.tokens - 1) - 1):
        yield [1] * rows + [2]


def reduced_model(
    spec: ModelSpec,
    options: TensorOptions,
    updates: LowRankUpdates | None = None,
    mesh: Mesh | None = None,
    collectives: Collectives | None = None,
    links: StageLinks = NO_LINKS,
) -> Model:
    """Build a model with fewer layers and uninitialised weights that launches the same kernels as the whole model.

    Args:
        spec: Spec of the whole model.
        updates: Receives the layers that adapters may change; None without adapters.
        mesh: Mesh position of the rank whose part of each layer is built.
        collectives: Collectives that do not wait for other ranks.
    """
    layers = layers_of_every_kind(spec)
    factory = LayerFactory(options, spec.quantization, mesh, collectives, updates)
    reduced = replace(spec, layers=spec.layers[:layers])
    model = build_model(reduced, factory, *links)
    with torch.inference_mode():
        for layer in factory.layers:
            layer.load_weights(_Uninitialised())
    return model


def layers_of_every_kind(spec: ModelSpec) -> int:
    """Return how many of the first layers are needed to include every kind of layer."""
    kinds = [layer.kind for layer in spec.layers]
    second = 2  # the first layer differs from it: nothing is added to its residual stream before
    return min(len(kinds), max(second, *(kinds.index(kind) + 1 for kind in kinds)))


class _Uninitialised:
    """A checkpoint whose reads leave the weights uninitialised."""

    def contents(self) -> dict[str, StoredTensor]:
        return {}

    def read(self, name: str, out: Tensor, start: Sequence[int] | None = None) -> None:
        """Leave `out` as it is."""

    def close(self) -> None:
        """Do nothing: no file is open."""


def _powers_up_to(most: int) -> list[int]:
    return sorted({1 << power for power in range(max(0, most).bit_length())} | {most}) if most > 0 else []
