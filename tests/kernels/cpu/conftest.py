"""Kernels are tested on every instruction set that the processor has, and without a compiler."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quire.compute.kernels.cpu.build import INSTRUCTION_SETS, installed_compilers, this_processor
from quire.compute.kernels.cpu.library import library
from quire.foundation.config import environment


@pytest.fixture(params=[*INSTRUCTION_SETS, "none"])
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The instruction set that the library is compiled for in this test."""
    name: str = request.param
    if name == "avx512" and INSTRUCTION_SETS["avx512_vnni"] <= this_processor().features:
        pytest.skip("avx512_vnni is tested, which differs in how pairs of integers are multiplied, and nothing else")
    if name != "none" and not INSTRUCTION_SETS[name] <= this_processor().features:
        pytest.skip(f"this processor has no {name}")
    monkeypatch.setenv("QUIRE_CPU_ISA", name)
    library.cache_clear()
    if name != "none":
        if not installed_compilers(environment.native_kernels().compilers):
            pytest.skip("there is no compiler")
        assert library() is not None, "the kernels do not compile"
    yield name
    library.cache_clear()
