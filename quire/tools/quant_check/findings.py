"""What was found: how far apart two distributions of the next token are, token by token, and the verdict on it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from quire.tools.quant_check.continuations import Scores
from quire.tools.quant_check.options import Thresholds


@dataclass(frozen=True)
class TokenFigures:
    """Figures by token, on the host.

    Attributes:
        kl: Kullback-Leibler divergence of the other model's distribution from the base model's, in nats, over the whole
            vocabulary: Σ p · (log p - log q).
        agrees: Whether both models find the same token likeliest.
        base_nll, other_nll: Each model's negative log probability of the token that follows, in nats.
    """

    kl: Tensor
    agrees: Tensor
    base_nll: Tensor
    other_nll: Tensor


def compare_logits(base: Tensor, other: Tensor, targets: Tensor) -> TokenFigures:
    """Compare the logits [tokens, vocabulary] of both models, given the tokens that follow, [tokens]."""
    p, q = base.float().log_softmax(-1), other.float().log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1).clamp_min(0)
    nll = (-each.gather(-1, targets.unsqueeze(-1)).squeeze(-1).cpu() for each in (p, q))
    return TokenFigures(kl.cpu(), (base.argmax(-1) == other.argmax(-1)).cpu(), *nll)


def joined(parts: Sequence[TokenFigures]) -> TokenFigures:
    columns = zip(*((part.kl, part.agrees, part.base_nll, part.other_nll) for part in parts), strict=True)
    return TokenFigures(*(torch.cat(column) for column in columns))


@dataclass(frozen=True)
class Divergence:
    """Figures of a text: KL divergences in nats a token, at 0, 1, … 100 percent of the tokens too; the share of tokens
    that both models find likeliest; and the perplexity of the base model and of the other one."""

    tokens: int
    mean_kl: float
    standard_error: float
    median_kl: float
    p99_kl: float
    max_kl: float
    top1_agreement: float
    base_perplexity: float
    perplexity: float
    kl_percentiles: tuple[float, ...]

    @property
    def perplexity_ratio(self) -> float:
        return self.perplexity / self.base_perplexity


def summarize(figures: TokenFigures) -> Divergence:
    """Means and spread; the means are not finite if any figure is not."""
    kl = figures.kl.double()
    percentiles = tuple(torch.quantile(kl, torch.linspace(0, 1, 101, dtype=kl.dtype)).tolist())
    return Divergence(
        tokens=len(kl),
        mean_kl=float(kl.mean()),
        standard_error=float(kl.std(correction=0)) / len(kl) ** 0.5,
        median_kl=percentiles[50],
        p99_kl=percentiles[99],
        max_kl=float(kl.max()),
        top1_agreement=float(figures.agrees.double().mean()),
        base_perplexity=float(figures.base_nll.double().mean().exp()),
        perplexity=float(figures.other_nll.double().mean().exp()),
        kl_percentiles=percentiles,
    )


UNKNOWN_TEXT = 1000.0
"""Perplexity above which a text is noise to a model."""
Verdict = Literal["good", "bad", "inconclusive"]


@dataclass(frozen=True)
class LayerFinding:
    """One layer, or a block that can only be swapped as a whole: by module, the relative error of its product on the
    base model's activations; and the divergence that it causes alone, in nats a token, None if not swapped."""

    name: str
    errors: dict[str, float]
    kl: float | None = None

    @property
    def worst(self) -> tuple[str, float] | None:
        """The module with the largest error, and that error."""
        if not self.errors:
            return None
        return max(self.errors.items(), key=lambda item: math.inf if math.isnan(item[1]) else item[1])


@dataclass(frozen=True)
class Findings:
    """All figures.

    Attributes:
        divergence: Over all tokens of all texts.
        layers: First the swapped ones, by the divergence that they cause alone; then the others by their errors.
        scores: None if no prompt has an answer.
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
    """The verdict on the figures. It is inconclusive if texts are noise to the base model, which both predict alike."""
    if missed:
        return "bad"
    return "good" if found.knows_texts else "inconclusive"


def failures(found: Findings, limits: Thresholds) -> list[str]:
    """A line for each missed threshold; empty if the quantization is good."""
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
