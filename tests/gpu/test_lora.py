"""Adapters on a card, beside PEFT: of ranks up to 64 and with magnitudes, in one batch with each other and with rows of
none. In 16 bits few rows take kernels of their own, which compute A x beside the product and add B A x in what follows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from quire import LLM
from tests.gpu.adapted import mean_errors, stages
from tests.gpu.test_parity import BLOCKS, SETTINGS, TIE
from tests.gpu.test_tensor_parallel import assert_adapted
from tests.offline.test_lora import KINDS, Stage, random_prompts

pytestmark = pytest.mark.gpu
CASES = ["llama, biases", "qwen3"]
NAMES: list[str | None] = [None, "all", "attention", "mlp", "q and v", "down", "patterns", "gate"]
LORA: dict[str, Any] = {"enable_lora": True, "max_loras": 8, "max_lora_rank": 64}


@pytest.fixture(scope="module")
def stage_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Stage]:
    return stages(tmp_path_factory, KINDS)


@pytest.mark.parametrize("eager", [True, False])
def test_float32_text_is_pefts(eager: bool, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert_adapted(tmp_path_factory.mktemp("float32"), SETTINGS | {"enforce_eager": eager})


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_rounded_text_is_near_pefts(case: str, dtype: str, stage_of: Callable[[str], Stage]) -> None:
    """On average as near as without an adapter, or up to twice as far; one row of each, and eight."""
    stage = stage_of(case)
    with LLM(str(stage.model), dtype=dtype, **LORA, **BLOCKS, **SETTINGS | {"max_num_seqs": 64}) as llm:
        for number in (1, 8):
            names = NAMES * number
            errors = mean_errors(stage, llm, random_prompts(5, [24] * len(names)), names)
            assert max(errors.values()) < 2 * errors[None] + TIE, errors
