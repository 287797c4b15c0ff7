"""Images whose tokens see one another, also those behind them: Gemma 3 against transformers' `generate`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.errors import ConfigError
from tests.media.checkpoints import GEMMA, make_gemma, picture

NEW_TOKENS = 16
IMAGE = GEMMA[1]
PROMPTS = ("The quick brown fox jumps", f"one two {IMAGE} What is your name?", f"{IMAGE} and {IMAGE}")
PICTURES = ((), (0,), (1, 2))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_gemma(tmp_path_factory.mktemp("gemma") / "model")


@pytest.fixture(scope="module")
def expected(model: Path) -> list[tuple[list[int], list[int]]]:
    """The tokens of each prompt, and those that transformers adds."""
    import torch
    from transformers import (
        AutoTokenizer,
        Gemma3ForConditionalGeneration,
        Gemma3ImageProcessorPil,
        Gemma3Processor,
    )

    images = Gemma3ImageProcessorPil(size={"height": 32, "width": 32}, image_seq_length=4)
    processor = Gemma3Processor(images, AutoTokenizer.from_pretrained(model), image_seq_length=4)
    reader = Gemma3ForConditionalGeneration.from_pretrained(model, dtype=torch.float32)
    found = []
    for text, seeds in zip(PROMPTS, PICTURES, strict=True):
        given = {"images": [picture(seed=seed) for seed in seeds]} if seeds else {}
        inputs = processor(text=text, return_tensors="pt", **given)
        inputs["token_type_ids"] = (inputs["input_ids"] == reader.config.image_token_id).int()
        with torch.no_grad():
            ids = reader.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None)[0].tolist()
        count = inputs["input_ids"].shape[1]
        found.append((ids[:count], ids[count:]))
    return found


def answers(llm: LLM, times: int = 1) -> list[tuple[list[int], list[int]]]:
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    prompts: Sequence[Any] = [
        {"prompt": text, "multi_modal_data": {"image": [picture(seed=seed) for seed in seeds]}}
        for text, seeds in zip(PROMPTS, PICTURES, strict=True)
    ]
    found = llm.generate([*prompts] * times, params, use_tqdm=False)
    return [(list(each.prompt_token_ids or ()), list(each.outputs[0].token_ids)) for each in found]


def test_answers_equal_those_of_transformers_in_chunks_and_from_the_prefix_cache(
    model: Path, expected: list[tuple[list[int], list[int]]]
) -> None:
    with LLM(str(model), dtype="float32", device="cpu", max_num_batched_tokens=7, block_size=8) as llm:
        assert answers(llm) == expected
        assert answers(llm) == expected


def test_preempted_requests_see_their_images_again(model: Path, expected: list[tuple[list[int], list[int]]]) -> None:
    with LLM(
        str(model), dtype="float32", device="cpu", block_size=8, num_gpu_blocks_override=20, max_model_len=64,
        enable_prefix_caching=False, preemption_mode="recompute", disable_log_stats=False,
    ) as llm:  # fmt: skip
        assert answers(llm, 2) == expected * 2
        counts = {metric.name: metric for metric in llm.get_metrics()}
        assert counts["vllm:num_preemptions"].value > 0


def test_steps_must_have_room_for_an_image(model: Path) -> None:
    with pytest.raises(ConfigError, match="give at least"):
        LLM(str(model), dtype="float32", device="cpu", max_num_batched_tokens=3, max_num_seqs=2)
