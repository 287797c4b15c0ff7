"""The options of `quire check-quant`: which models, on which texts, and what counts as good."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Annotated, ClassVar, Literal

import tyro

from quire.foundation.config.model import ModelDtype
from quire.foundation.config.values import check_range


@dataclass(frozen=True)
class Thresholds:
    """What a good quantization keeps. docs/check-quant.md says where the defaults come from."""

    max_kl: float = 0.1
    """Most KL divergence a token, in nats, on average over all tokens."""
    min_top1_agreement: float = 0.88
    """Least share of tokens whose likeliest token is the same, 0 to 1."""
    max_perplexity_ratio: float = 1.05
    """Most that the perplexity may be, by the base model's."""
    max_score_drop: float = 3.0
    """Most points (percent of the questions with answers) that may be lost."""
    max_layer_error: float = 0.25
    """Most relative error of one layer's product on the base model's activations."""

    def __post_init__(self) -> None:
        check_range(self, 0, None, *(each.name for each in fields(self)))


@dataclass(frozen=True)
class CheckOptions:
    """Which models are compared, on which texts, and where the result goes."""

    DESCRIPTION: ClassVar[str] = (
        "Measure what quantization costs: quire check-quant BASE QUANT. Exit code 0: good, 1: bad, by the thresholds; "
        "2 to 6: it could not be measured."
    )

    base: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="BASE")]
    """The model before it was quantized: a directory or a hub id."""
    quantized: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="QUANT")]
    """The quantized model."""
    prompts: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """File of prompts, a JSON object a line: "prompt" (text or token ids) or "messages", optionally "answer". What is
    compared are the base model's own greedy answers. Default: built-in texts, most of them English."""
    max_tokens: int = 128
    """Tokens of an answer."""
    quantization: str | None = None
    """How QUANT's weights are quantized at the start, as in quire serve: check-quant BASE BASE --quantization fp8."""
    dtype: ModelDtype = "auto"
    """Of activations and of weights that are not quantized, in both models. Default: BASE's."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where both models are computed. Without room for the weights of both, they are read layer by layer."""
    worst_layers: int = 5
    """How many of the layers with the largest errors are swapped one at a time, to see what each causes alone."""
    json: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the result to this file."""
    picture: Annotated[str | None, tyro.conf.arg(metavar="FILE.svg")] = None
    """Draw errors by layer, and how the divergence is spread over tokens."""
    thresholds: Thresholds = field(default_factory=Thresholds)

    def __post_init__(self) -> None:
        check_range(self, 1, None, "max_tokens")
        check_range(self, 0, None, "worst_layers")
