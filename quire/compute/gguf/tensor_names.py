"""Which tensor of a GGUF file is which weight of a checkpoint in Hugging Face layout, and how it differs from it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from quire.compute.gguf.architectures import Architecture, architecture_of, heads_of
from quire.compute.gguf.header import GgufTensor
from quire.compute.gguf.model_files import GgufModel

_IN_LAYER = re.compile(r"^blk\.(\d+)\.(.+)\.(weight|bias)$")
_OF_EXPERTS = re.compile(r"^ffn_(gate|up|down)_exps$")
_OF_ONE_EXPERT = re.compile(r"^ffn_(gate|up|down)\.(\d+)$")
_OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_READ_FOR_CONFIG = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""The tools keep these among the weights; see model_config.py. Some write the first for each layer."""


@dataclass(frozen=True)
class WeightSource:
    """Where a weight comes from.

    Attributes:
        tensor: The file's.
        shape: Of the weight.
        first_row: Where it begins in a stack of experts.
        heads: Its rows are those of so many heads, each with the two halves of its pairs side by side, where the
            weight has first all first halves; 0: rows are as they are.
        less: What is to be taken off: Gemma's norms are stored with 1 added.
    """

    tensor: GgufTensor
    shape: tuple[int, ...]
    first_row: int = 0
    heads: int = 0
    less: float = 0.0


def weight_sources(model: GgufModel) -> dict[str, WeightSource]:
    """Every weight by its name in a checkpoint; a tensor that is none keeps its own name, which no model reads.

    Raises:
        CheckpointError: The architecture is not served.
    """
    architecture = architecture_of(model.metadata)
    return dict(_sources(model, architecture))


def _sources(model: GgufModel, architecture: Architecture) -> Iterator[tuple[str, WeightSource]]:
    heads = {part: heads_of(model.metadata, part) for part in ("q", "k")} if architecture.rotates_pairs else {}
    for name, tensor in model.tensors.items():
        if name.endswith(_READ_FOR_CONFIG):
            continue
        found = _IN_LAYER.match(name)
        if found is None:
            less = architecture.norms_less if name.endswith("norm.weight") else 0.0
            yield _OUTSIDE.get(name, name), WeightSource(tensor, tensor.shape, less=less)
            continue
        layer, part, kind = f"model.layers.{found[1]}", found[2], found[3]
        if (stack := _OF_EXPERTS.match(part)) and architecture.experts and len(tensor.shape) == 3:
            yield from _experts(f"{layer}.{architecture.experts}", architecture.expert_names[stack[1]], tensor)
        elif (one := _OF_ONE_EXPERT.match(part)) and architecture.experts:
            module = f"{layer}.{architecture.experts}.experts.{one[2]}.{architecture.expert_names[one[1]]}"
            yield f"{module}.{kind}", WeightSource(tensor, tensor.shape)
        else:
            known = architecture.modules.get(part)
            theirs = name if known is None else f"{layer}.{known}.{kind}"
            less = architecture.norms_less if part.endswith("norm") else 0.0
            rotated = heads.get(part.removeprefix("attn_"), 0) if part.startswith("attn_") else 0
            yield theirs, WeightSource(tensor, tensor.shape, heads=rotated, less=less)


def _experts(module: str, projection: str, tensor: GgufTensor) -> Iterator[tuple[str, WeightSource]]:
    """A stack [experts, rows, columns], expert by expert."""
    count, rows, columns = tensor.shape
    for number in range(count):
        name = f"{module}.experts.{number}.{projection}.weight"
        yield name, WeightSource(tensor, (rows, columns), first_row=number * rows)
