"""The rows of logits that logits transforms change, and where their tokens are.

Knows nothing about what the transforms do.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from quire.runtime.worker.host_memory import upload

ActiveRows = Sequence[tuple[int, int]]
"""(row of the logits, slot) of the rows whose slots have any transform."""


def flat_index(logits: Tensor, tokens: Sequence[tuple[int, Tensor]]) -> Tensor:
    """Places in the flattened logits [sampled · vocab] of (row, token ids [n]), one behind another."""
    counts = [len(ids) for _, ids in tokens]
    starts = np.repeat(np.array([row for row, _ in tokens], dtype=np.int64), counts) * logits.shape[-1]
    return torch.cat([ids for _, ids in tokens]).add_(upload(starts, logits.device))
