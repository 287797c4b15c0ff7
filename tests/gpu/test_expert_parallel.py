"""Two cards that have half of the experts each say what one says: fp32 greedy text that is transformers' own, with
graphs and over cached blocks; bf16 about as near to the exact logits as theirs; quantized experts as one card's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire import LLM
from tests.checkpoints import edit_config, make_tiny
from tests.gpu.several_cards import NEEDS_FOUR, NEEDS_TWO, assert_as_near, assert_text
from tests.gpu.test_parity import BLOCKS, GREEDY, SETTINGS
from tests.parity.cases import CASES
from tests.parity.test_architectures import prompts
from tests.worker.startup.test_compile_warmup import GPTQ

pytestmark = [pytest.mark.gpu, NEEDS_TWO]
EXPERTS: dict[str, Any] = {"tensor_parallel_size": 2, "enable_expert_parallel": True, **SETTINGS}
QWEN = "qwen3 moe"


@pytest.mark.parametrize(
    "settings",
    [EXPERTS, pytest.param(EXPERTS | {"pipeline_parallel_size": 2}, marks=NEEDS_FOUR)],
    ids=["one stage", "two"],
)
@pytest.mark.parametrize("case", [QWEN, "mixtral"])
def test_float32_text_is_transformers(case: str, settings: dict[str, Any], tmp_path: Path) -> None:
    assert_text(case, tmp_path, settings)


def test_bfloat16_is_as_near_as_transformers(tmp_path: Path) -> None:
    assert_as_near(QWEN, tmp_path, EXPERTS)


def test_codes_are_served(tmp_path: Path) -> None:
    """Their groups are whole in each rank. Sums are rounded otherwise, so an output may differ."""
    sizes = {"hidden_size": 64, "moe_intermediate_size": 64, "intermediate_size": 128, "head_dim": 32}
    directory, said = make_tiny(tmp_path, **CASES[QWEN] | sizes), []
    edit_config(directory, {"quantization_config": GPTQ})
    for ranks in ({"tensor_parallel_size": 1, "enable_expert_parallel": False}, {}):
        with LLM(str(directory), dtype="bfloat16", load_format="dummy", **BLOCKS, **(EXPERTS | ranks)) as llm:
            said.append([output.outputs[0].token_ids[0] for output in llm.generate(prompts(), GREEDY)])
    same = sum(one == two for one, two in zip(*said, strict=True))
    assert same >= len(said[0]) - 1, said
