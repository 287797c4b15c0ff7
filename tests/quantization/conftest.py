"""Which kernels compute."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quire.compute.kernels.cpu.library import library


@pytest.fixture
def torch_computes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The references, without kernels in C++."""
    monkeypatch.setenv("QUIRE_CPU_ISA", "none")
    library.cache_clear()
    yield
    library.cache_clear()
