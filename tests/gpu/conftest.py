"""Whole engines on a card: every test here is marked `gpu`, and leaves the card's memory as it found it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before the marks are looked at
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(autouse=True)
def memory_is_given_back() -> Iterator[None]:
    """An engine that is left over would take the next one's blocks."""
    yield
    gc.collect()
    torch.cuda.empty_cache()
