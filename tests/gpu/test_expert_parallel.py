"""Two cards that have half of the experts each say what one says: fp32 greedy text that is transformers' own, with
graphs and over cached blocks; bf16 about as near to the exact logits as theirs; quantized experts as one card's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM
from tests.checkpoints import edit_config, make_tiny
from tests.gpu.test_parity import (
    BLOCKS,
    EVERYTHING,
    EXACTLY,
    GREEDY,
    SETTINGS,
    answers_of,
    assert_all_free,
    assert_greedy,
    assert_near,
)
from tests.parity.cases import CASES
from tests.parity.oracle import Oracle
from tests.parity.test_architectures import prompts
from tests.worker.startup.test_compile_warmup import GPTQ

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two cards"),
    pytest.mark.usefixtures("not_refused_on_gpus"),
]
EXPERTS: dict[str, Any] = {"tensor_parallel_size": 2, "enable_expert_parallel": True, **SETTINGS}
FOUR = pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four cards")
QWEN = "qwen3 moe"


@pytest.mark.parametrize(
    "settings", [EXPERTS, pytest.param(EXPERTS | {"pipeline_parallel_size": 2}, marks=FOUR)], ids=["one stage", "two"]
)
@pytest.mark.parametrize("case", [QWEN, "mixtral"])
def test_float32_text_is_transformers(case: str, settings: dict[str, Any], tmp_path: Path) -> None:
    directory = make_tiny(tmp_path, **CASES[case])
    reference, batch = Oracle(directory, device="cuda"), prompts()
    with LLM(str(directory), dtype="float32", **BLOCKS, **settings) as llm:
        for prompt, output in zip(batch, llm.generate(batch, GREEDY), strict=True):
            assert_greedy(reference, prompt, output)
        (again,) = llm.generate([batch[2]], GREEDY)
        assert_greedy(reference, batch[2], again)
        assert_all_free(llm)


def test_bfloat16_is_as_near_as_transformers(tmp_path: Path) -> None:
    directory = make_tiny(tmp_path, **CASES[QWEN])
    with LLM(str(directory), dtype="bfloat16", **EXACTLY, **BLOCKS, **EXPERTS) as llm:
        answers = answers_of(llm, prompts(), EVERYTHING)
    assert_near(directory, prompts(), answers)


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
