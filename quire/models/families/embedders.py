"""Decoders without their head for tokens: embedding models, and models with a head for labels or rewards."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from quire.models.config_file import ConfigFile
from quire.models.families import gemma, llama, qwen
from quire.models.families.encoders import ReadModel, chain
from quire.models.families.family import Family
from quire.models.text_head_spec import HeadPooling, HeadStep, with_label_head

if TYPE_CHECKING:
    from quire.models.spec import ModelSpec

_DECODERS: dict[str, Family] = {
    "Llama": llama.FAMILIES["LlamaForCausalLM"],
    "Mistral": llama.FAMILIES["MistralForCausalLM"],
    "Qwen2": qwen.FAMILIES["Qwen2ForCausalLM"],
    "Qwen3": qwen.FAMILIES["Qwen3ForCausalLM"],
    "Gemma": gemma.FAMILIES["GemmaForCausalLM"],
    "Gemma2": gemma.FAMILIES["Gemma2ForCausalLM"],
    "Gemma3Text": gemma.FAMILIES["Gemma3ForCausalLM"],
}
"""Decoders by what the names of their architectures begin with."""


def _bare(fields: ConfigFile, spec: ModelSpec) -> ModelSpec:
    return replace(spec, generates=False)


def _labels(pooling: HeadPooling, *, bias: bool) -> ReadModel:
    """Return a reader of a head of one product."""
    return lambda fields, spec: with_label_head(fields, spec, (), HeadStep("score", 0, bias), pooling)


def _labels_of_both_sides(fields: ConfigFile, spec: ModelSpec) -> ModelSpec:
    """Return the spec with the head of NVIDIA's rerankers, whose `pooling` is a mean unless it says otherwise."""
    pooling: dict[str, HeadPooling] = {"avg": "mean", "cls": "cls", "last": "last"}
    asked = fields.choice("pooling", tuple(pooling), "avg")
    return with_label_head(fields, spec, (), HeadStep("score", 0, bias=False), pooling[asked])


def _rewards(fields: ConfigFile, spec: ModelSpec) -> ModelSpec:
    """Return the spec with the head of Qwen's reward models: a value, or a value for each label, of each token."""
    steps = (HeadStep("score.0", spec.hidden, activation="relu"),)
    return with_label_head(fields, spec, steps, HeadStep("score.2", 0), "all")


def _headless(family: Family, *readers: ReadModel) -> Family:
    before = () if family.read_model is None else (family.read_model,)
    return replace(family, read_model=chain(*before, *readers))


def _of_both_sides(family: Family) -> Family:
    """Return the family with attention to both sides unless the file says that it is causal."""
    return replace(family, defaults={**family.defaults, "is_causal": False})


FAMILIES: dict[str, Family] = {
    **{f"{name}Model": _headless(family, _bare) for name, family in _DECODERS.items()},
    **{
        f"{name}ForSequenceClassification": _headless(family, _labels("last", bias=False))
        for name, family in _DECODERS.items()
    },
    **{
        f"{name}ForTokenClassification": _headless(family, _labels("all", bias=True))
        for name, family in _DECODERS.items()
        if name != "Gemma3Text"
    },
    "LlamaBidirectionalModel": _headless(_of_both_sides(_DECODERS["Llama"]), _bare),
    "LlamaBidirectionalForSequenceClassification": _headless(_of_both_sides(_DECODERS["Llama"]), _labels_of_both_sides),
    "Qwen2ForRewardModel": _headless(
        replace(_DECODERS["Qwen2"], defaults={**_DECODERS["Qwen2"].defaults, "num_labels": 1}), _rewards
    ),
    "Qwen2ForProcessRewardModel": _headless(_DECODERS["Qwen2"], _rewards),
}
