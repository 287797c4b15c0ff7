"""A model divided over ranks: into how many parts it can be divided, and how large one part is. Imports no torch."""

from __future__ import annotations

from dataclasses import replace

from quire.errors import ConfigError
from quire.models.spec import ModelSpec
from quire.quantization.held_bytes import HeldWeights


def rank_share(spec: ModelSpec, tp: int) -> ModelSpec:
    """The spec of a model as large as the part of one of `tp` ranks: what memory, the KV cache and attention go by.

    Layers are built of the whole spec; LayerFactory divides them.
    """
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


def check_tensor_parallel_size(spec: ModelSpec, size: int) -> None:
    """Refuse a number of ranks that layers cannot be divided over.

    Raises:
        ConfigError: It is one; the message lists those that are not.
    """
    if size < 1 or not _divides(spec, size):
        served = ", ".join(str(number) for number in range(1, spec.heads + 1) if _divides(spec, number))
        raise ConfigError(
            f"--tensor-parallel-size {size}: this model can be divided over {served} ranks. They must divide its "
            f"{spec.heads} query heads and the width of its MLPs, and divide its {spec.kv_heads} KV heads or be a "
            "multiple of them.",
            param="tensor_parallel_size",
        )


def _divides(spec: ModelSpec, size: int) -> bool:
    experts = spec.experts
    widths = [] if experts is None else [experts.width]
    if experts is None or len(experts.layers) < spec.layers:
        widths.append(spec.intermediate)
    kv_heads = spec.kv_heads % size == 0 or size % spec.kv_heads == 0
    vocabulary = -(-spec.vocab_size // size) * (size - 1) < spec.vocab_size  # every rank has some of it
    return spec.heads % size == 0 and kv_heads and vocabulary and all(width % size == 0 for width in widths)
