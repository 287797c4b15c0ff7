"""How far two distributions of the next token are from each other, token by token. Knows nothing about models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenFigures:
    """By token, on the host.

    Attributes:
        kl: Kullback-Leibler divergence of the other model's distribution from the base model's, in nats, over the whole
            vocabulary: Σ p · (log p - log q).
        agrees: Whether both find the same token likeliest.
        base_nll, other_nll: Each one's negative log probability of the token that comes, in nats.
    """

    kl: Tensor
    agrees: Tensor
    base_nll: Tensor
    other_nll: Tensor


def compare_logits(base: Tensor, other: Tensor, targets: Tensor) -> TokenFigures:
    """Logits [tokens, vocabulary] of both, and the tokens that come, [tokens]."""
    p, q = base.float().log_softmax(-1), other.float().log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1).clamp_min(0)
    nll = (-each.gather(-1, targets.unsqueeze(-1)).squeeze(-1).cpu() for each in (p, q))
    return TokenFigures(kl.cpu(), (base.argmax(-1) == other.argmax(-1)).cpu(), *nll)


def joined(parts: Sequence[TokenFigures]) -> TokenFigures:
    """All tokens of these."""
    columns = zip(*((part.kl, part.agrees, part.base_nll, part.other_nll) for part in parts), strict=True)
    return TokenFigures(*(torch.cat(column) for column in columns))


@dataclass(frozen=True)
class Divergence:
    """Figures of a text.

    Attributes:
        tokens: How many were compared.
        mean_kl, standard_error, median_kl, p99_kl, max_kl: In nats a token.
        top1_agreement: 0 to 1.
        base_perplexity, perplexity: Of the base model and of the other one.
        kl_percentiles: At 0, 1, … 100 percent of the tokens.
    """

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
        """The other model's, by the base model's."""
        return self.perplexity / self.base_perplexity


def summarize(figures: TokenFigures) -> Divergence:
    """Means and spread; figures that are not finite make the means so."""
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
