"""Divides a model over ranks: which numbers of parts are possible, and the size of one part. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import replace

from quire.compute.mesh import Mesh
from quire.errors import ConfigError
from quire.models.layer_spec import AttentionSpec, LayerSpec, MixtureSpec
from quire.models.quantization.held_bytes import HeldWeights
from quire.models.spec import ModelSpec
from quire.models.vision.module_spec import ModuleVisionSpec


def rank_share(spec: ModelSpec, mesh: Mesh) -> ModelSpec:
    """Return the spec of a model as large as a rank's part, from which memory, the KV cache and attention are planned.

    Layers are built from the whole spec, since LayerFactory divides them.
    """
    share = _part(_stage(spec, mesh), mesh.tp)
    return share if spec.mixture is None or mesh.ep == 1 else _with_own_experts(share, spec.mixture, mesh)


def _stage(spec: ModelSpec, mesh: Mesh) -> ModelSpec:
    """Return the spec of one pipeline stage, whose layers are numbered from 0.

    KV groups are the whole model's, so that block tables mean the same on every stage; some may have no layer here.
    """
    if mesh.pp == 1:
        return spec
    own, held = mesh.own_layers(len(spec.layers)), spec.held
    return replace(
        spec,
        has_tower=mesh.is_first,
        layers=spec.layers[own.start : own.stop],
        held=None if held is None else HeldWeights(held.dense, held.fixed * len(own) // len(spec.layers)),
        tables=(mesh.is_first or mesh.is_last) if spec.tie_embeddings else mesh.is_first + mesh.is_last,
        groups=tuple(
            replace(group, layers=tuple(layer - own.start for layer in group.layers if layer in own))
            for group in spec.kv_groups()
        ),
    )


def _part(spec: ModelSpec, tp: int) -> ModelSpec:
    """Return the spec with a tensor-parallel part of every layer."""
    if tp == 1:
        return spec
    held = spec.held
    layers, groups = tuple(layer.divided(tp) for layer in spec.layers), spec.groups
    if groups is None and max(spec.block_entries, default=1) > 1:  # which a part alone might divide otherwise
        groups = spec.kv_groups()
    if groups is not None:  # some of which may have no layer here
        groups = tuple(replace(group, form=layers[(*group.layers, 0)[0]].mixer.form) for group in groups)
    return replace(
        spec,
        tp=tp,
        layers=layers,
        groups=groups,
        held=None if held is None else HeldWeights(held.dense // tp, held.fixed // tp),
    )


def _with_own_experts(share: ModelSpec, experts: MixtureSpec, mesh: Mesh) -> ModelSpec:
    """Return the spec with a part of every layer, but whole experts.

    Of quantized weights, nothing says which ones are experts'. If a rank has more than its part of the experts, all
    weights count as experts'; if it has less, they count by the number of experts' weights.
    """
    own, held = mesh.own_experts(experts.count).count, share.held
    ways = mesh.tp * own / experts.count
    if held is not None and ways >= 1.0:
        held = HeldWeights(math.ceil(held.dense * ways), math.ceil(held.fixed * ways))
    elif held is not None:
        weights = share.mixture.count * share.mixture.expert_weights * share.layers_with_experts if share.mixture else 0
        left = 1.0 - (1.0 - ways) * weights / share.linear_weights
        held = HeldWeights(held.dense, math.ceil(held.fixed * left))
    mlp = experts.with_whole_experts(mesh.tp, own, mesh.engines)
    layers = tuple(replace(layer, mlp=mlp) if isinstance(layer.mlp, MixtureSpec) else layer for layer in share.layers)
    return replace(share, layers=layers, held=held)


def check_pipeline_parallel_size(spec: ModelSpec, size: int) -> None:
    """Refuse more pipeline stages than layers, or any where layers read what only one stage has.

    Raises:
        ConfigError: There are more stages than layers, or less than one, or a layer reads another one's cache, or
            images are added to layers of several stages.
    """
    layers = len(spec.layers)
    reads_others = any(
        layer.input is not None or layer.shared is not None or layer.mixer.source is not None for layer in spec.layers
    )
    if size > 1 and reads_others:
        raise ConfigError(
            f"--pipeline-parallel-size {size} is not served with {spec.architecture}, whose layers read the tokens or "
            "one another's KV cache: use --tensor-parallel-size.",
            param="pipeline_parallel_size",
        )
    if 1 <= size <= layers and isinstance(spec.vision, ModuleVisionSpec):
        first, deep = len(Mesh(pp=size).own_layers(layers)), max(spec.vision.deep, default=0)
        if deep > first:
            raise ConfigError(
                f"--pipeline-parallel-size {size}: the first stage would have {first} layers, and images are added to "
                f"the output of the first {deep}: lower it, use --tensor-parallel-size, or give --language-model-only.",
                param="pipeline_parallel_size",
            )
    if not 1 <= size <= layers:
        raise ConfigError(
            f"--pipeline-parallel-size {size}: must be from 1 to {layers}, the number of this model's layers.",
            param="pipeline_parallel_size",
        )


def check_tensor_parallel_size(spec: ModelSpec, size: int, *, whole_experts: bool = False) -> None:
    """Refuse a number of ranks over which the layers cannot be divided.

    Args:
        size: The number of ranks.
        whole_experts: Whether each rank has some whole experts instead of a part of each.

    Raises:
        ConfigError: The layers cannot be divided; the message lists the numbers that can.
    """
    if size < 1 or not _divides(spec, size, whole_experts):
        sizes = range(1, spec.attention.heads + 1)
        served = ", ".join(str(number) for number in sizes if _divides(spec, number, whole_experts))
        experts = spec.mixture.count if spec.mixture and whole_experts else 0
        kv_heads = ""
        if isinstance(spec.attention, AttentionSpec):
            kv_heads = f", and divide its {spec.attention.kv_heads} KV heads or be a multiple of them"
        raise ConfigError(
            f"--tensor-parallel-size {size}: this model can be divided over {served} ranks. They must divide its "
            f"{spec.attention.heads} query heads and the width of its MLPs{kv_heads}."
            f"{_OF_WHOLE_EXPERTS.format(experts) if experts else ''}",
            param="tensor_parallel_size",
        )


_OF_WHOLE_EXPERTS = (
    " With --enable-expert-parallel each has one of its {} experts at least, whose width does not count."
)


def _divides(spec: ModelSpec, size: int, whole_experts: bool) -> bool:
    vocabulary = -(-spec.vocab_size // size) * (size - 1) < spec.vocab_size  # every rank has some of it
    return vocabulary and all(_layer_divides(layer, size, whole_experts) for layer in set(spec.layers))


def _layer_divides(layer: LayerSpec, size: int, whole_experts: bool) -> bool:
    if isinstance(layer.mlp, MixtureSpec):
        return layer.mixer.divides(size) and layer.mlp.divides(size, whole_experts=whole_experts)
    return layer.mixer.divides(size) and layer.mlp.divides(size)
