"""A model divided over ranks: into how many parts it can be divided, and how large one part is. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import replace

from quire.compute.mesh import Mesh
from quire.errors import ConfigError
from quire.models.quantization.held_bytes import HeldWeights
from quire.models.spec import ExpertsSpec, ModelSpec


def rank_share(spec: ModelSpec, mesh: Mesh) -> ModelSpec:
    """The spec of a model as large as a rank's part: what memory, the KV cache and attention go by.

    Layers are built of the whole spec; LayerFactory divides them.
    """
    share = _part(_stage(spec, mesh), mesh.tp)
    return share if spec.experts is None or mesh.ep == 1 else _with_own_experts(share, spec, spec.experts, mesh)


def _stage(spec: ModelSpec, mesh: Mesh) -> ModelSpec:
    """Some of the layers, numbered from 0 on. KV groups are the whole model's, so that tables mean the same everywhere;
    some may have no layer here."""
    if mesh.pp == 1:
        return spec
    own, experts, held = mesh.own_layers(spec.layers), spec.experts, spec.held
    with_experts = frozenset(layer - own.start for layer in experts.layers if layer in own) if experts else frozenset()
    return replace(
        spec,
        layers=len(own),
        local=spec.local[own.start : own.stop],
        scales=spec.scales[own.start : own.stop],
        experts=None if experts is None else replace(experts, layers=with_experts),
        held=None if held is None else HeldWeights(held.dense, held.fixed * len(own) // spec.layers),
        tables=(mesh.is_first or mesh.is_last) if spec.tie_embeddings else mesh.is_first + mesh.is_last,
        groups=tuple(
            replace(group, layers=tuple(layer - own.start for layer in group.layers if layer in own))
            for group in spec.kv_groups()
        ),
    )


def _part(spec: ModelSpec, tp: int) -> ModelSpec:
    """A part of every layer."""
    if tp == 1:
        return spec
    experts, held = spec.experts, spec.held
    return replace(
        spec,
        tp=tp,
        heads=spec.heads // tp,
        kv_heads=max(1, spec.kv_heads // tp),
        intermediate=spec.intermediate // tp,
        experts=None if experts is None else replace(experts, width=experts.width // tp),
        held=None if held is None else HeldWeights(held.dense // tp, held.fixed // tp),
    )


def _with_own_experts(share: ModelSpec, spec: ModelSpec, experts: ExpertsSpec, mesh: Mesh) -> ModelSpec:
    """A part of every layer, but whole experts. Of quantized weights it is not known which are those of experts: where
    a rank has more than its part of them, they count as if all were; where it has less, by how many weights are."""
    assert share.experts is not None
    own, held = mesh.own_experts(experts.count).count, share.held
    ways = mesh.tp * own / experts.count
    if held is not None and ways >= 1.0:
        held = HeldWeights(math.ceil(held.dense * ways), math.ceil(held.fixed * ways))
    elif held is not None:
        weights = len(share.experts.layers) * experts.count * 3 * share.hidden * share.experts.width
        left = 1.0 - (1.0 - ways) * weights / share.linear_weights
        held = HeldWeights(held.dense, math.ceil(held.fixed * left))
    of_experts = replace(share.experts, width=experts.width, of_others=experts.count - own, engines=mesh.engines)
    return replace(share, experts=of_experts, held=held)


def check_pipeline_parallel_size(spec: ModelSpec, size: int) -> None:
    """Refuse more stages than layers.

    Raises:
        ConfigError: There are more, or less than one.
    """
    if not 1 <= size <= spec.layers:
        raise ConfigError(
            f"--pipeline-parallel-size {size}: must be from 1 to {spec.layers}, the number of this model's layers.",
            param="pipeline_parallel_size",
        )


def check_tensor_parallel_size(spec: ModelSpec, size: int, *, whole_experts: bool = False) -> None:
    """Refuse a number of ranks that layers cannot be divided over.

    Args:
        whole_experts: Each rank has some of the experts, not a part of each.

    Raises:
        ConfigError: It is one; the message lists those that are not.
    """
    if size < 1 or not _divides(spec, size, whole_experts):
        sizes = range(1, spec.heads + 1)
        served = ", ".join(str(number) for number in sizes if _divides(spec, number, whole_experts))
        experts = spec.experts.count if spec.experts and whole_experts else 0
        raise ConfigError(
            f"--tensor-parallel-size {size}: this model can be divided over {served} ranks. They must divide its "
            f"{spec.heads} query heads and the width of its MLPs, and divide its {spec.kv_heads} KV heads or be a "
            f"multiple of them.{_OF_WHOLE_EXPERTS.format(experts) if experts else ''}",
            param="tensor_parallel_size",
        )


_OF_WHOLE_EXPERTS = (
    " With --enable-expert-parallel each has one of its {} experts at least, whose width does not count."
)


def _divides(spec: ModelSpec, size: int, whole_experts: bool) -> bool:
    experts = spec.experts
    widths = [] if experts is None or whole_experts else [experts.width]
    if experts is None or len(experts.layers) < spec.layers:
        widths.append(spec.intermediate)
    kv_heads = spec.kv_heads % size == 0 or size % spec.kv_heads == 0
    vocabulary = -(-spec.vocab_size // size) * (size - 1) < spec.vocab_size  # every rank has some of it
    enough = experts is None or not whole_experts or size <= experts.count
    return spec.heads % size == 0 and kv_heads and vocabulary and enough and all(width % size == 0 for width in widths)
