"""What one step may hold."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SchedulerConfig:
    """Continuous batching."""

    max_num_seqs: int | None = None
    """Most sequences in one step. Default: 256."""
    max_num_batched_tokens: int | None = None
    """Most tokens in one step; longer prompts are read in chunks. Default: 512."""
