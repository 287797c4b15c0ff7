"""Figures of two sets of logits, beside torch's own functions."""

from __future__ import annotations

import pytest
import torch

from quire.tools.quant_check.findings import compare_logits, joined, summarize


def test_figures_of_distributions_that_are_far_apart_are_those_of_torch() -> None:
    """Where the divergence of p from q and of q from p are not the same."""
    generator = torch.Generator().manual_seed(1)
    base, other = (torch.randn((40, 30), generator=generator) * size for size in (3.0, 1.0))
    targets = torch.randint(0, 30, (40,), generator=generator)
    parts = [compare_logits(base[rows], other[rows], targets[rows]) for rows in (slice(0, 7), slice(7, 40))]
    found = summarize(joined(parts))
    p, q = torch.distributions.Categorical(logits=base), torch.distributions.Categorical(logits=other)
    kl = torch.distributions.kl_divergence(p, q)
    assert found.tokens == 40
    assert found.mean_kl == pytest.approx(float(kl.mean()), rel=1e-5)
    assert found.standard_error == pytest.approx(float(kl.std(correction=0)) / 40**0.5, rel=1e-5)
    assert found.median_kl == pytest.approx(float(kl.quantile(0.5)), rel=1e-5)
    assert found.max_kl == pytest.approx(float(kl.max()), rel=1e-5)
    assert found.top1_agreement == float((base.argmax(-1) == other.argmax(-1)).float().mean())
    assert found.base_perplexity == pytest.approx(float(torch.nn.functional.cross_entropy(base, targets).exp()))
    assert found.perplexity == pytest.approx(float(torch.nn.functional.cross_entropy(other, targets).exp()))


def test_equal_logits_diverge_by_nothing() -> None:
    logits = torch.randn((5, 9))
    found = summarize(compare_logits(logits, logits.clone(), torch.zeros(5, dtype=torch.int64)))
    assert (found.mean_kl, found.top1_agreement, found.perplexity_ratio) == (0, 1, 1)
