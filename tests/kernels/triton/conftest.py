"""Kernels run compiled where there is a card, and under Triton's interpreter elsewhere."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel's module is imported, so set before any is


@pytest.fixture(scope="session")
def device() -> str:
    """Where kernels are tested."""
    return "cuda" if torch.cuda.is_available() else "cpu"
