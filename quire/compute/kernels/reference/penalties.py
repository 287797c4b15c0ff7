"""Presence, frequency and repetition penalties on logits, and the counts that they use.

A row of `seen` has, for each token, twice the number of times that it is in the output, plus one if it is in the
prompt. The formulas are those of Keskar et al. 2019 ("CTRL", section 4.1) and of OpenAI's API.
"""

from __future__ import annotations

import torch
from torch import Tensor

IN_PROMPT, ONE_MORE = 1, 2
"""What the prompt and one more time in the output add to an entry of `seen`."""


def apply_penalties(logits: Tensor, reads: Tensor, rows: Tensor, seen: Tensor, weights: Tensor) -> None:
    """Change the logits of some reads.

    Args:
        logits: [reads, vocab] fp32, changed in place.
        reads: [n] int64, the reads, each once.
        rows: [n] int64, their rows of `seen` and `weights`.
        seen: [rows, vocab] int32.
        weights: [rows, 3] fp32: presence, frequency, repetition. For tokens of the sequence, repetition divides
            positive logits and multiplies others; then frequency is subtracted for each time that the token is in the
            output, and presence once.
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
    """Count the tokens [reads] int64 that some reads [n] int64 drew in their rows [n] of seen [rows, vocab] int32.

    No row is given twice.
    """
    seen[rows, tokens.index_select(0, reads)] += ONE_MORE
