"""Muon: momentum whose update is made orthogonal, for the matrices inside a transformer.

Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/. Embeddings and norms stay with AdamW.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class Muon:
    """Steps all matrices of one shape at once: the orthogonalization is a batched product."""

    def __init__(self, matrices: Iterable[nn.Parameter], momentum: float = 0.95, decay: float = 0.05) -> None:
        shapes: dict[torch.Size, list[nn.Parameter]] = {}
        for matrix in matrices:
            shapes.setdefault(matrix.shape, []).append(matrix)
        self._groups = [
            (group, torch.zeros(len(group), *shape, device=group[0].device)) for shape, group in shapes.items()
        ]
        self._momentum, self._decay = momentum, decay

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for group, velocity in self._groups:
            gradient = torch.stack(
                [matrix.grad for matrix in group if matrix.grad is not None]
            )  # [group, rows, columns]
            velocity.lerp_(gradient, 1 - self._momentum)
            update = orthogonal(gradient.lerp(velocity, self._momentum))
            rows, columns = group[0].shape
            scale = rate * max(1.0, rows / columns) ** 0.5
            for matrix, change in zip(group, update, strict=True):
                matrix.mul_(1 - rate * self._decay).add_(change, alpha=-scale)


def orthogonal(g: Tensor, steps: int = 5) -> Tensor:
    """The matrices [n, rows, columns] with all singular values near 1, by a quintic Newton-Schulz iteration in bf16."""
    x: Tensor = g.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        squared = x @ x.mT
        x = 3.4445 * x + (-4.7750 * squared + 2.0315 * squared @ squared) @ x
    return x.mT if tall else x
