"""Describes the head of a model that makes values of texts: labels, scores, or logits of masked tokens.

Does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from quire.models.config_file import ConfigFile

if TYPE_CHECKING:
    from quire.models.spec import ModelSpec

HeadPooling = Literal["cls", "mean", "last", "all", "late"]
"""The states that a head reads: the first token's, the mean of all, the last token's, or those of all tokens, of whose
values the mean counts if it is `late`."""
PROBLEMS = ("regression", "single_label_classification", "multi_label_classification")


@dataclass(frozen=True)
class HeadStep:
    """A product of a head, an activation, and maybe a layer norm.

    Attributes:
        name: The name of the product's module.
        width: The number of outputs.
        bias: Whether the product has a bias.
        activation: config.json's name of the activation; empty: none.
        norm: The name of the norm, which is of the model's kind; empty: none.
    """

    name: str
    width: int
    bias: bool = True
    activation: str = ""
    norm: str = ""


@dataclass(frozen=True)
class TextHead:
    """The head of a model that makes values of texts.

    Attributes:
        steps: Its products in order; the last one makes the values.
        pooling: The states that it reads.
        labels: Names of the values, in their order; empty if they are logits of tokens.
        problem: config.json's `problem_type`; empty: it is missing.
        embeds: Whether the values are a token's vector (Khattab & Zaharia 2020, ColBERT).
    """

    steps: tuple[HeadStep, ...]
    pooling: HeadPooling
    labels: tuple[str, ...] = ()
    problem: str = ""
    embeds: bool = False

    def weights(self, inputs: int, norm: int) -> int:
        """Return the number of weights for states `inputs` wide; a norm has `norm` weights for each output."""
        total = 0
        for step in self.steps:
            total += step.width * (inputs + step.bias + (norm if step.norm else 0))
            inputs = step.width
        return total


def read_labels(fields: ConfigFile) -> tuple[str, ...]:
    """Return the names of labels: `id2label`, or numbers if the file only has `num_labels`; two, if it has neither.

    Files of transformers 2 and 3 may have `num_labels` and an `id2label` of two, which was the default.

    Raises:
        CheckpointError: `id2label` does not name the numbers from 0 on.
    """
    names, number_of = fields.get("id2label"), fields.count("num_labels", 2)
    counts = isinstance(names, dict) and fields.get("num_labels") is not None and len(names) != number_of
    if names is None or counts:
        return tuple(f"LABEL_{number}" for number in range(number_of))
    if not isinstance(names, dict) or sorted(names, key=_number) != [str(number) for number in range(len(names))]:
        raise fields.wrong("id2label", "must name the labels 0, 1 and so on")
    return tuple(str(names[str(number)]) for number in range(len(names)))


def read_problem(fields: ConfigFile) -> str:
    """Return `problem_type`; empty: it is missing."""
    return fields.choice("problem_type", ("", *PROBLEMS), "")


def with_label_head(
    fields: ConfigFile, spec: ModelSpec, steps: tuple[HeadStep, ...], last: HeadStep, pooling: HeadPooling
) -> ModelSpec:
    """Return the spec with a head whose last step has as many outputs as the file has labels."""
    labels = read_labels(fields)
    head = TextHead((*steps, replace(last, width=len(labels))), pooling, labels, read_problem(fields))
    return replace(spec, text_head=head, generates=False)


def _number(name: object) -> int:
    return int(name) if isinstance(name, str) and name.isdecimal() else -1
