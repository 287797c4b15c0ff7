"""What engines over several cards say, held against transformers, however the model is divided."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM
from tests.checkpoints import make_tiny
from tests.gpu.test_parity import (
    BLOCKS,
    EVERYTHING,
    EXACTLY,
    GREEDY,
    answers_of,
    assert_all_free,
    assert_greedy,
    assert_near,
    assert_preempted,
)
from tests.parity.cases import CASES
from tests.parity.oracle import Oracle
from tests.parity.test_architectures import prompts

NEEDS_TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two cards")
NEEDS_FOUR = pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four cards")


def assert_text(case: str, directory: Path, settings: dict[str, Any]) -> None:
    """fp32 greedy text is transformers', over cached blocks too."""
    make_tiny(directory, **CASES[case])
    reference, batch = Oracle(directory, device="cuda"), prompts()
    with LLM(str(directory), dtype="float32", **BLOCKS, **settings) as llm:
        for prompt, output in zip(batch, llm.generate(batch, GREEDY), strict=True):
            assert_greedy(reference, prompt, output)
        (again,) = llm.generate([batch[2]], GREEDY)
        assert again.num_cached_tokens == 80
        assert_greedy(reference, batch[2], again)
        assert_all_free(llm)


def assert_preempted_text(case: str, directory: Path, mode: str, settings: dict[str, Any]) -> None:
    """The same after preemptions."""
    make_tiny(directory, **CASES[case])
    assert_preempted(directory, Oracle(directory, device="cuda"), prompts(), mode, 16, settings)


def assert_as_near(case: str, directory: Path, settings: dict[str, Any]) -> None:
    """bf16 is about as near to the exact logits as transformers' own."""
    make_tiny(directory, **CASES[case])
    with LLM(str(directory), dtype="bfloat16", **EXACTLY, **BLOCKS, **settings) as llm:
        answers = answers_of(llm, prompts(), EVERYTHING)
    assert_near(directory, prompts(), answers)
