"""Ways to route tokens to 12 experts, other than by the likeliest of a softmax."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.compute.kernels.routing import Routing

SCORED: dict[str, Routing] = {
    "sigmoid": Routing(3, True, "sigmoid", epsilon=1e-20),
    "corrected": Routing(3, True, "sigmoid", scale=2.5, correction=True),
    "softmax, corrected": Routing(4, False, correction=True),
    "groups by two": Routing(4, True, "sigmoid", 2.5, groups=4, kept_groups=2, of_best_two=True, correction=True),
    "groups by one": Routing(3, False, "softmax", 16.0, groups=3, kept_groups=1),
    "sqrtsoftplus": Routing(5, True, "sqrtsoftplus", 1.5, correction=True),
    "bounded": Routing(3, False, "softmax", cap=1.5),
    "sparsemixer": Routing(2, False, "sparsemixer", margin=0.05),
}


def scored(rules: str, tokens: int) -> tuple[Routing, Tensor, Tensor | None]:
    """A routing, logits [tokens, 12] that are not near one another, and the correction, if it has one."""
    generator = torch.Generator().manual_seed(len(rules))
    logits = torch.rand(tokens, 12, generator=generator).argsort(-1).float() / 4 - 1.5
    correction = torch.randn(12, generator=generator)
    return SCORED[rules], logits, correction if SCORED[rules].correction else None
