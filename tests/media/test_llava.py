"""LLaVA's and Idefics3's answers about images, compared with transformers' `generate` in fp32.

Idefics3 stands for towers of transformers' modules, and for images with tokens between those of their vectors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import LLM, SamplingParams
from quire.errors import RequestError
from tests.media.checkpoints import IMAGE, IMAGE_TOKEN, TOKENS, clip_settings, make_idefics, make_llava, picture

NEW_TOKENS = 32
PROMPTS = (
    "The quick brown fox",
    f"{IMAGE} What is your name?",
    f"one two {IMAGE} three {IMAGE}",
    f"{IMAGE}{IMAGE} naïve {IMAGE} café {IMAGE} Hello",
)
"""With 0, 1, 2 and 4 images."""


@pytest.fixture(scope="module", params=[make_llava, make_idefics])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = request.param(tmp_path_factory.mktemp("llava") / "model")
    return made


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    """Steps of 7 tokens: an image of 9 is computed in several of them."""
    with LLM(str(model), dtype="float32", max_num_batched_tokens=7, block_size=8) as llm:
        yield llm


def prompt(text: str, *seeds: int) -> dict[str, Any]:
    return {"prompt": text, "multi_modal_data": {"image": [picture(seed=seed) for seed in seeds]}}


PICTURES = ((), (0,), (1, 2), (3, 0, 1, 2))


def greedy(llm: LLM, prompts: Sequence[Any]) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    return [list(each.outputs[0].token_ids) for each in llm.generate(list(prompts), params, use_tqdm=False)]


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    return [reference(model, text, seeds) for text, seeds in zip(PROMPTS, PICTURES, strict=True)]


def has_tiles(model: Path) -> bool:
    return (model / "processor_config.json").is_file()


def reference(model: Path, text: str, seeds: Sequence[int]) -> list[int]:
    """What transformers' processor and model make of a prompt."""
    import torch
    from transformers import (
        AutoModelForImageTextToText,
        AutoProcessor,
        AutoTokenizer,
        CLIPImageProcessorPil,
        LlavaProcessor,
    )

    if has_tiles(model):
        processor: Any = AutoProcessor.from_pretrained(model)
    else:
        processor = LlavaProcessor(
            CLIPImageProcessorPil(**clip_settings()),
            AutoTokenizer.from_pretrained(model),
            patch_size=14,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
            image_token=IMAGE,
        )
    inputs = processor(
        text=text, images=[picture(seed=seed) for seed in seeds] or None, return_tensors="pt", add_special_tokens=True
    )
    inputs.pop("token_type_ids", None)
    reader = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        found = reader.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None)
    tokens: list[int] = found[0, inputs["input_ids"].shape[1] :].tolist()
    return tokens


def test_answers_equal_those_of_transformers_with_0_to_4_images(llm: LLM, expected: list[list[int]]) -> None:
    prompts = [prompt(text, *seeds) for text, seeds in zip(PROMPTS, PICTURES, strict=True)]
    assert greedy(llm, prompts) == expected
    assert greedy(llm, prompts) == expected  # from the prefix cache


def test_another_image_never_hits_the_prefix_cache_and_the_same_image_does(llm: LLM) -> None:
    text = f"{IMAGE} The answer is 42."
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    first, other, again = (llm.generate(prompt(text, seed), params, use_tqdm=False)[0] for seed in (10, 11, 10))
    assert other.num_cached_tokens == 0
    assert again.num_cached_tokens == len(again.prompt_token_ids or ()) // 8 * 8
    assert again.outputs[0].token_ids == first.outputs[0].token_ids != other.outputs[0].token_ids


def test_several_answers_and_a_conversation_see_the_image(llm: LLM, model: Path, expected: list[list[int]]) -> None:
    text = PROMPTS[1]
    params = SamplingParams(temperature=1, top_k=1, max_tokens=NEW_TOKENS, ignore_eos=True, n=3)
    (found,) = llm.generate(prompt(text, 0), params, use_tqdm=False)
    assert [list(each.token_ids) for each in found.outputs] == [expected[1]] * 3

    parts = [{"type": "image_pil", "image_pil": picture(seed=0)}, {"type": "text", "text": "What?"}]
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    (chat,) = llm.chat([{"role": "user", "content": parts}], params, use_tqdm=False)
    (same,) = llm.generate(prompt(f"USER: {IMAGE}\nWhat?\nASSISTANT:", 0), params, use_tqdm=False)
    assert chat.outputs[0].token_ids == same.outputs[0].token_ids
    assert (chat.prompt_token_ids or []).count(IMAGE_TOKEN) == (20 if has_tiles(model) else TOKENS)


def test_preempted_requests_see_their_images_again(model: Path, expected: list[list[int]]) -> None:
    """Room for two long sequences only, without a prefix cache: others are computed anew."""
    blocks, longest = (66, 256) if has_tiles(model) else (22, 128)
    with LLM(
        str(model), dtype="float32", block_size=8, num_gpu_blocks_override=blocks, enable_prefix_caching=False,
        max_model_len=longest, preemption_mode="recompute", disable_log_stats=False,
    ) as llm:  # fmt: skip
        prompts = [prompt(text, *seeds) for text, seeds in zip(PROMPTS, PICTURES, strict=True)] * 2
        assert greedy(llm, prompts) == expected * 2
        counts = {metric.name: metric for metric in llm.get_metrics()}
        assert counts["vllm:num_preemptions"].value > 0


def test_wrong_images_are_refused(llm: LLM) -> None:
    refused: list[tuple[Any, str]] = [
        ({"prompt": "Hello", "multi_modal_data": {"image": picture()}}, "0 placeholders for images and 1 images"),
        ({"prompt": IMAGE, "multi_modal_data": {"image": [picture()] * 2}}, "1 placeholders for images and 2 images"),
        ({"prompt": IMAGE, "multi_modal_data": {"image": 3}}, "PIL.Image or an array, got int"),
        (
            {"prompt": IMAGE, "multi_modal_data": {"video": [picture()]}},
            "reads text and images alone: leave videos out",
        ),
        ({"prompt": IMAGE, "multi_modal_data": {"image": "https://example.com/a.png"}}, "--allowed-media-domains"),
        ({"prompt": IMAGE, "multi_modal_data": {"image": "data:image/png;base64,AAAA"}}, "cannot be read"),
    ]
    for given, message in refused:
        with pytest.raises(RequestError, match=message):
            llm.generate(given, use_tqdm=False)


def test_of_many_requests_none_sees_the_image_of_another(llm: LLM) -> None:
    """More images than the worker keeps vectors of, in steps with several of them."""
    texts = (f"{IMAGE} What is your name?", f"Hello {IMAGE}", "The answer is 42.")
    asked = [(text, seed) for text in texts for seed in range(12)]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)

    def answers(order: Sequence[tuple[str, int]]) -> list[Any]:
        prompts = [prompt(text, seed) if IMAGE in text else text for text, seed in order]
        return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]

    alone: dict[tuple[str, int], Any] = {}
    for each in asked:
        llm.reset_prefix_cache()
        (alone[each],) = answers([each])
    assert len({tuple(alone[texts[0], seed]) for seed in range(12)}) > 6  # images differ
    mixed = [asked[place] for place in np.random.default_rng(0).permutation(len(asked) * 3) % len(asked)]
    assert answers(mixed) == [alone[each] for each in mixed]
