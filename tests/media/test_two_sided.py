"""Images whose tokens see one another, also those behind them: Gemma 3 against transformers' `generate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.errors import ConfigError, RequestError
from quire.foundation.config import environment
from quire.media.module_processor import ModuleProcessor
from quire.models.fallback.image_processor import CheckpointProcessor
from quire.models.fallback.tower_inspection import describe
from tests.media.checkpoints import GEMMA, make_gemma, picture
from tests.models_sweep.image_rows import ROWS, write_images_model
from tests.models_sweep.test_images import generated

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


def test_images_of_gemma_4_see_those_behind_them_in_windows_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The image has the most tokens that its processor allows: none of the sizes that a start tries has as many."""
    row = ROWS["gemma4"]
    text = row["text"] | {"use_bidirectional_attention": "vision", "sliding_window": 72}
    monkeypatch.setitem(ROWS, "gemma4", row | {"text": text})
    monkeypatch.setattr(environment, "fallback_cache", lambda: tmp_path / "descriptions")
    model = write_images_model(tmp_path / "model", "Gemma4ForConditionalGeneration", "gemma4")
    token, image = model.config.image_token_id, picture(80, 56)
    processor = CheckpointProcessor(tmp_path / "model", token).processor
    ids, found, logprobs = generated(model, processor, "one <image> two", [image], token, "static")
    assert ids.count(token) == 70
    with LLM(
        str(tmp_path / "model"), dtype="float32", device="cpu", max_model_len=128, max_num_batched_tokens=70,
        max_num_seqs=4, num_gpu_blocks_override=64, block_size=8,
    ) as llm:  # fmt: skip
        prompt: Any = {"prompt": "one <image> two", "multi_modal_data": {"image": [image]}}
        params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0)
        (output,) = llm.generate([prompt], params, use_tqdm=False)
    assert (list(output.prompt_token_ids or ()), list(output.outputs[0].token_ids)) == (ids, found)
    own = [by_token[token].logprob for by_token, token in zip(output.outputs[0].logprobs or (), found, strict=True)]
    assert own == pytest.approx(logprobs, abs=1e-3)


def test_images_of_more_tokens_than_a_step_has_room_for_are_refused(model: Path) -> None:
    spec = describe(model)
    processor = ModuleProcessor(replace(spec, longest=spec.longest - 1), {})
    with pytest.raises(RequestError, match="send a smaller image"):
        processor.picture(picture())
