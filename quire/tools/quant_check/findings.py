"""What was found, and the verdict on it. Plain data: knows nothing about how it was measured or shown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from quire.tools.quant_check.continuations import Scores
from quire.tools.quant_check.divergence import Divergence
from quire.tools.quant_check.options import Thresholds

UNKNOWN_TEXT = 1000.0
"""Perplexity from which on a text is noise to a model."""
Verdict = Literal["good", "bad", "inconclusive"]


@dataclass(frozen=True)
class LayerFinding:
    """One layer, or a block that can only be swapped whole.

    Attributes:
        name: Of its modules.
        errors: By module, the relative error of its product on the base model's activations.
        kl: What it causes alone, in nats a token; None: it was not swapped.
    """

    name: str
    errors: dict[str, float]
    kl: float | None = None

    @property
    def worst(self) -> tuple[str, float] | None:
        """The module with the largest error."""
        if not self.errors:
            return None
        return max(self.errors.items(), key=lambda item: math.inf if math.isnan(item[1]) else item[1])


@dataclass(frozen=True)
class Findings:
    """All figures.

    Attributes:
        texts: How many were compared.
        divergence: Over all of their tokens.
        layers: First those that were swapped, by what they cause alone; then by their errors.
        scores: None: no prompt has an answer.
        notes: What to know about the figures.
    """

    texts: int
    divergence: Divergence
    layers: tuple[LayerFinding, ...]
    scores: Scores | None = None
    notes: tuple[str, ...] = ()

    @property
    def knows_texts(self) -> bool:
        """Whether the texts mean anything to the base model."""
        return self.divergence.base_perplexity <= UNKNOWN_TEXT


def verdict(found: Findings, missed: Sequence[str]) -> Verdict:
    """What the figures say; noise that both models predict alike says nothing."""
    if missed:
        return "bad"
    return "good" if found.knows_texts else "inconclusive"


def failures(found: Findings, limits: Thresholds) -> list[str]:
    """A line for each threshold that is missed; none: the quantization is good."""
    figures, missed = found.divergence, []
    if not figures.mean_kl <= limits.max_kl:
        missed.append(f"KL divergence {figures.mean_kl:.4g} nats a token: more than --max-kl {limits.max_kl:g}")
    if not figures.top1_agreement >= limits.min_top1_agreement:
        missed.append(
            f"top-1 agreement {figures.top1_agreement:.4g}: less than --min-top1-agreement "
            f"{limits.min_top1_agreement:g}"
        )
    if not figures.perplexity_ratio <= limits.max_perplexity_ratio:
        missed.append(
            f"perplexity {figures.perplexity:.4g} is {figures.perplexity_ratio:.4g} × the base model's: more than "
            f"--max-perplexity-ratio {limits.max_perplexity_ratio:g}"
        )
    if found.scores and found.scores.base - found.scores.quantized > limits.max_score_drop:
        missed.append(
            f"score {found.scores.quantized:.1f} % after {found.scores.base:.1f} %: more than --max-score-drop "
            f"{limits.max_score_drop:g} points less"
        )
    for layer in found.layers:
        if layer.worst and not layer.worst[1] <= limits.max_layer_error:
            name, error = layer.worst
            missed.append(f"{name} has an error of {error:.3g}: more than --max-layer-error {limits.max_layer_error:g}")
    return missed
