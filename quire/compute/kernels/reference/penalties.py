"""Presence, frequency and repetition penalties on logits, and the counts they go by.

A row of `seen` says of each token how often an output has it, times two, plus one if the prompt has it. The formulas
are those of Keskar et al. 2019 ("CTRL", section 4.1) and of OpenAI's API.
"""

from __future__ import annotations

import torch
from torch import Tensor

IN_PROMPT, ONE_MORE = 1, 2
"""In an entry of `seen`."""


def apply_penalties(logits: Tensor, reads: Tensor, rows: Tensor, seen: Tensor, weights: Tensor) -> None:
    """Change the logits of some reads.

    Args:
        logits: [reads, vocab] fp32, changed in place.
        reads: [n] int64, which reads; each once.
        rows: [n] int64, the row of `seen` and `weights` of each.
        seen: [rows, vocab] int32.
        weights: [rows, 3] fp32: presence, frequency, repetition. Repetition divides positive logits and multiplies the
            others, of all tokens that the sequence has; then frequency is taken off for each time that the output has
            the token, and presence once.
    """
    for read, row in zip(reads.tolist(), rows.tolist(), strict=True):
        ids = seen[row].nonzero().squeeze(1)  # few, beside the vocabulary
        counts = seen[row].index_select(0, ids) >> 1
        presence, frequency, repetition = weights[row]
        x = logits[read].index_select(0, ids)
        x = torch.where(x > 0, x / repetition, x * repetition)
        x = x - frequency * counts - presence * (counts > 0)
        logits[read].index_copy_(0, ids, x)


def count_sampled(tokens: Tensor, reads: Tensor, rows: Tensor, seen: Tensor) -> None:
    """Count the tokens that some reads drew.

    Args:
        tokens: [reads] int64.
        reads: [n] int64, which reads.
        rows: [n] int64, the row of `seen` of each; no row twice.
        seen: [rows, vocab] int32, changed in place.
    """
    seen[rows, tokens.index_select(0, reads)] += ONE_MORE
