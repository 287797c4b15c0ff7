"""Swaps of models, as this process has seen them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class SwapCounts:
    """What is counted.

    Attributes:
        done, failed: How they ended.
        proceeds: Whether one does not have an end yet.
        waiting: Requests that wait for a model.
    """

    done: int = 0
    failed: int = 0
    proceeds: bool = False
    waiting: int = 0
