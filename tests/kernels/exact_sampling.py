"""Drawing by the definitions, in fp64 and one row at a time: which token, and which others rounding might lead to."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire.compute.kernels.reference.philox import uniform
from quire.compute.kernels.reference.sample import SamplingColumns
from quire.sampling_params import MIN_TEMPERATURE

ROUNDING = 3e-6
"""What sums of exponentials in fp32 may be off by, as shares of the whole."""


@dataclass(frozen=True)
class Truth:
    """Of one row.

    Attributes:
        cumulative: [vocab] fp64, of the probabilities of what the filters leave.
        kept: [vocab] what they leave.
        unsure: [vocab] what rounding may keep or cut.
        number: In [0, 1).
    """

    cumulative: Tensor
    kept: Tensor
    unsure: Tensor
    number: float

    @property
    def token(self) -> int:
        """What is drawn."""
        return min(int((self.cumulative <= self.number).sum()), len(self.kept) - 1)

    def miss(self, token: int) -> float:
        """By how much the number lies beyond the token's share; infinite for a token that is surely cut."""
        if not (self.kept | self.unsure)[token]:
            return math.inf
        before = float(self.cumulative[token - 1]) if token else 0.0
        return max(before - self.number, self.number - float(self.cumulative[token]), 0.0)

    @property
    def slack(self) -> float:
        """The largest miss that rounding explains."""
        shares = self.cumulative.diff(prepend=self.cumulative.new_zeros(1))
        return ROUNDING + float(shares[self.unsure].sum())


def truth(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, number: float) -> Truth:
    """Of logits [vocab] and a random number."""
    x = logits.double()
    unsure = torch.zeros(len(x), dtype=torch.bool)
    if temperature == 0:
        best = int((x == x.max()).nonzero()[0])
        return Truth((torch.arange(len(x)) >= best).double(), ~unsure, unsure, number)
    weights = ((x - x.max()) / max(temperature, MIN_TEMPERATURE)).exp()
    kept = weights >= min_p
    if min_p > 0:
        unsure |= (weights < 1) & ((weights - min_p).abs() < ROUNDING)
    order = (-x).sort(stable=True).indices
    order = order[kept[order]]
    if top_k > 0:
        order = order[:top_k]
    if top_p < 1:
        sums = weights[order].cumsum(0)
        before = (sums - weights[order]) / sums[-1]
        unsure[order[1:]] |= (before[1:] - top_p).abs() < ROUNDING  # the likeliest stays whatever top_p is
        order = order[: max(1, int((before < top_p).sum()))]
    kept = torch.zeros(len(x), dtype=torch.bool)
    kept[order] = True
    cumulative = (weights * kept).cumsum(0)
    return Truth(cumulative / cumulative[-1], kept, unsure, number)


def truths(logits: Tensor, slots: Tensor, asked: SamplingColumns) -> list[Truth]:
    """Of rows [reads, vocab] on any device."""
    columns = SamplingColumns(*(column.cpu()[slots.cpu()] for column in asked))
    numbers = uniform(columns.seed, columns.drawn).tolist()
    parameters = (c.tolist() for c in (columns.temperature, columns.top_k, columns.top_p, columns.min_p))
    return [truth(row, *each, number) for row, *each, number in zip(logits.cpu(), *parameters, numbers, strict=True)]


def columns(device: str, wishes: list[dict[str, Any]]) -> SamplingColumns:
    """A slot for each of `wishes`."""
    defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0, "drawn": 0}
    whole = {"top_k", "seed", "drawn"}
    return SamplingColumns(
        *(
            torch.tensor(
                [(defaults | wish)[name] for wish in wishes],
                dtype=torch.int64 if name in whole else torch.float32,
                device=device,
            )
            for name in SamplingColumns._fields
        )
    )
