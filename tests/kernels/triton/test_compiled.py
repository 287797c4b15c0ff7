"""The kernels compile for a card: the interpreter, which other tests run them in, takes more than the compiler does."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton.not_interpreted import printed_by


@pytest.mark.long("engine")
@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a card, every test compiles what it runs")
@pytest.mark.parametrize("arguments", [(), ("--float16",)])
def test_every_case_of_the_benchmark_compiles(arguments: tuple[str, ...]) -> None:
    assert "rms_norm" in printed_by("tests.kernels.triton.compile_cases", *arguments).split()
