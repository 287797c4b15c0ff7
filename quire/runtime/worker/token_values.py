"""Makes one vector of a text out of a head's values of all its tokens, a bounded number of tokens at a time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from quire.compute.attention.metadata import IntArray
from quire.models.sentence_files import TokenValues
from quire.runtime.worker.host_memory import upload


def reduce_values(
    states: Tensor, counts: IntArray, values_of: Callable[[Tensor], Tensor], how: TokenValues, at_once: int
) -> Tensor:
    """Reduce the values of each text's tokens: states [tokens, width] → [texts, values] fp32.

    Args:
        states: The states of the texts, one behind the other.
        counts: Tokens of each text, which has at least one.
        values_of: Computes the head's values of states [n, width] → [n, values] fp32.
        how: What is taken of them.
        at_once: Maximum number of tokens whose values are there at a time.
    """
    ends = np.cumsum(counts)
    reduced: list[Tensor] = []
    for begin in range(0, len(states), at_once):
        end = min(begin + at_once, len(states))
        first, last = (int(np.searchsorted(ends, place, side="right")) for place in (begin, end - 1))
        lengths = np.diff(np.concatenate(([begin], np.minimum(ends[first : last + 1], end))))
        values = values_of(states[begin:end])
        for _ in range(how.logs):
            values = torch.log1p(torch.relu(values))
        own = _of_segments(values, upload(lengths, states.device), "max" if how.reduce == "max" else "sum")
        if first < len(reduced):  # the first text has begun before
            before = reduced[first]
            own[0] = torch.maximum(before, own[0]) if how.reduce == "max" else before + own[0]
            reduced.pop()
        reduced.extend(own)
    whole = torch.stack(reduced)
    return whole / upload(counts, states.device, torch.float32).unsqueeze(1) if how.reduce == "mean" else whole


def _of_segments(values: Tensor, lengths: Tensor, reduce: str) -> Tensor:
    initial = float("-inf") if reduce == "max" else 0.0
    found: Tensor = torch.segment_reduce(values, reduce, lengths=lengths, unsafe=True, initial=initial)
    return found
