"""Qwen2-VL's, Qwen2.5-VL's and Qwen3-VL's answers about images, compared with transformers' `generate` in fp32."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import LLM, SamplingParams
from quire.errors import RequestError
from quire.media.decode import as_rgb
from quire.media.model_images import ModelImages
from quire.media.module_processor import ModuleProcessor
from quire.media.qwen_processor import QwenProcessor
from quire.models.vision.module_spec import ModuleVisionSpec
from quire.models.vision.pixel_settings import PixelValues
from quire.models.vision.vision_spec import QwenVisionSpec, read_vision
from tests.media.checkpoints import QWEN_IMAGE, QWEN_PROCESSOR, make_qwen, picture

Size = tuple[int, int]
NEW_TOKENS = 32
PIXELS = PixelValues.of({})
PROMPTS = (
    "The quick brown fox",
    f"{QWEN_IMAGE} What is your name?",
    f"one two {QWEN_IMAGE} three {QWEN_IMAGE}",
    f"{QWEN_IMAGE}{QWEN_IMAGE} naïve {QWEN_IMAGE} café {QWEN_IMAGE} Hello",
)
BOUNDS = {"shortest_edge": 64, "longest_edge": 640}
SIZES: tuple[tuple[Size, ...], ...] = (
    (),
    ((60, 44),),
    ((20, 90), (33, 33)),
    ((8, 8), (70, 30), (44, 60), (9, 99)),
)


def pictures(sizes: Sequence[Size]) -> list[Any]:
    return [picture(width, height, seed) for seed, (width, height) in enumerate(sizes)]


@pytest.fixture(scope="module", params=["2", "2_5", "3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen(tmp_path_factory.mktemp("qwen") / "model", request.param)


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    return [reference(model, text, pictures(sizes)) for text, sizes in zip(PROMPTS, SIZES, strict=True)]


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), dtype="float32", max_num_batched_tokens=7, block_size=8) as llm:
        yield llm


def reference(model: Path, text: str, images: list[Any]) -> list[int]:
    """What transformers' processor and model make of a prompt."""
    import torch
    from transformers import AutoModelForImageTextToText, AutoTokenizer, Qwen2VLImageProcessorPil

    tokenizer = AutoTokenizer.from_pretrained(model)
    given: dict[str, Any] = {}
    if images:
        found = Qwen2VLImageProcessorPil(**QWEN_PROCESSOR)(images=images, return_tensors="pt")
        given = dict(found)
        for t, h, w in found["image_grid_thw"].tolist():
            text = text.replace("<|image_pad|>", "<|placeholder|>" * (t * h * w // 4), 1)
        text = text.replace("<|placeholder|>", "<|image_pad|>")
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    reader = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32)
    if images:
        given["mm_token_type_ids"] = (ids == reader.config.image_token_id).int()
    with torch.no_grad():
        out = reader.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), **given, max_new_tokens=NEW_TOKENS, do_sample=False,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
    tokens: list[int] = out[0, ids.shape[1] :].tolist()
    return tokens


def prompt(text: str, sizes: Sequence[Size]) -> dict[str, Any]:
    return {"prompt": text, "multi_modal_data": {"image": pictures(sizes)}}


def greedy(llm: LLM, prompts: Sequence[Any]) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    return [list(each.outputs[0].token_ids) for each in llm.generate(list(prompts), params, use_tqdm=False)]


def test_answers_equal_those_of_transformers_with_0_to_4_images(llm: LLM, expected: list[list[int]]) -> None:
    prompts = [prompt(text, sizes) for text, sizes in zip(PROMPTS, SIZES, strict=True)]
    assert greedy(llm, prompts) == expected
    assert greedy(llm, prompts) == expected  # from the prefix cache


def test_a_prompt_asks_for_fewer_pixels(llm: LLM, model: Path) -> None:
    asked = prompt(PROMPTS[1], SIZES[1])
    params = SamplingParams(temperature=0, max_tokens=1)
    if isinstance(read_vision(model), ModuleVisionSpec):
        with pytest.raises(RequestError, match="with the checkpoint's settings"):
            llm.generate(asked | {"mm_processor_kwargs": {"max_pixels": 10 * 64}}, params, use_tqdm=False)
        return
    (plain,) = llm.generate(asked, params, use_tqdm=False)
    (small,) = llm.generate(asked | {"mm_processor_kwargs": {"max_pixels": 10 * 64}}, params, use_tqdm=False)
    assert len(small.prompt_token_ids or ()) < len(plain.prompt_token_ids or ())
    for wrong, message in (({"max_pixels": 31 * 64}, "31 tokens, and this server's have 30"), ({"size": 5}, "size")):
        with pytest.raises(RequestError, match=message):
            llm.generate(asked | {"mm_processor_kwargs": wrong}, params, use_tqdm=False)


def test_another_image_never_hits_the_prefix_cache_and_the_same_image_does(llm: LLM) -> None:
    text = f"{QWEN_IMAGE} The answer is 42."
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    images = picture(60, 44, 10), picture(60, 44, 11), picture(60, 44, 10)
    first, other, again = (
        llm.generate({"prompt": text, "multi_modal_data": {"image": image}}, params, use_tqdm=False)[0]
        for image in images
    )
    assert other.num_cached_tokens == 0
    assert again.num_cached_tokens == len(again.prompt_token_ids or ()) // 8 * 8
    assert again.outputs[0].token_ids == first.outputs[0].token_ids != other.outputs[0].token_ids


def test_several_answers_and_a_conversation_see_the_image(llm: LLM, expected: list[list[int]]) -> None:
    params = SamplingParams(temperature=1, top_k=1, max_tokens=NEW_TOKENS, ignore_eos=True, n=3)
    (found,) = llm.generate(prompt(PROMPTS[1], SIZES[1]), params, use_tqdm=False)
    assert [list(each.token_ids) for each in found.outputs] == [expected[1]] * 3
    parts = [{"type": "image", "image": picture(60, 44, 0)}, {"type": "text", "text": "What?"}]
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    (chat,) = llm.chat([{"role": "user", "content": parts}], params, use_tqdm=False)
    asked = f"<|im_start|>user\n{QWEN_IMAGE}What?<|im_end|>\n<|im_start|>assistant\n"
    (same,) = llm.generate(prompt(asked, SIZES[1]), params, use_tqdm=False)
    assert chat.outputs[0].token_ids == same.outputs[0].token_ids


def test_preempted_requests_see_their_images_again(model: Path, expected: list[list[int]]) -> None:
    """Room for two long sequences only, without a prefix cache: others are computed anew, in chunks of other sizes."""
    with LLM(
        str(model), dtype="float32", block_size=8, num_gpu_blocks_override=30, enable_prefix_caching=False,
        max_model_len=160, preemption_mode="recompute", disable_log_stats=False,
    ) as llm:  # fmt: skip
        prompts = [prompt(text, sizes) for text, sizes in zip(PROMPTS, SIZES, strict=True)] * 2
        assert greedy(llm, prompts) == expected * 2
        counts = {metric.name: metric for metric in llm.get_metrics()}
        assert counts["vllm:num_preemptions"].value > 0


PUBLISHED: dict[str, Any] = {"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "merge_size": 2}


@pytest.mark.parametrize(
    "settings", [QWEN_PROCESSOR, PUBLISHED, {"size": {"shortest_edge": 9_000, "longest_edge": 90_000}, "resample": 2}]
)
def test_pixels_and_tokens_equal_those_of_transformers(settings: dict[str, Any]) -> None:
    from transformers import Qwen2VLImageProcessorPil

    patch = settings.get("patch_size", 14)
    spec = QwenVisionSpec(
        image_token=5, pixels=PIXELS, patch_size=patch, frames=2, merge=2, hidden=16, width=24, layers=2, heads=2,
        gated=True, activation="silu", eps=1e-6, window=16, whole_layers=(), outputs=48, min_pixels=1, max_pixels=10,
    )  # fmt: skip
    processor, reference = QwenProcessor(spec, settings), Qwen2VLImageProcessorPil(**settings)
    for width, height in ((1, 1), (1, 150), (27, 29), (60, 44), (97, 1000), (4000, 21), (1280, 720)):
        image = picture(width, height)
        expected = reference(images=image, return_tensors="np")
        pixels, count, rows, columns, *_ = processor.picture(as_rgb(image))
        assert [1, 2 * rows, 2 * columns] == expected["image_grid_thw"][0].tolist()
        assert (count, pixels.shape) == (rows * columns, (2 * rows * patch, 2 * columns * patch, 3))
        numbers = spec.pixels.table[pixels, np.arange(3)].transpose(2, 0, 1)
        squares = numbers.reshape(3, rows, 2, patch, columns, 2, patch).transpose(1, 4, 2, 5, 0, 3, 6)
        found = np.repeat(squares[:, :, :, :, :, None], 2, axis=5).reshape(4 * count, -1)
        np.testing.assert_array_equal(found, expected["pixel_values"])


def test_text_models_of_transformers_see_images(tmp_path: Path) -> None:
    """The text model by transformers' own modules, with positions of rows and columns, in chunks."""
    model = make_qwen(tmp_path / "model", "2_5")
    text, images = PROMPTS[2], pictures(SIZES[2])
    with LLM(
        str(model), dtype="float32", max_num_batched_tokens=7, block_size=8, max_model_len=128,
        model_impl="transformers",
    ) as llm:  # fmt: skip
        assert greedy(llm, [prompt(text, SIZES[2])]) == [reference(model, text, images)]


def test_long_and_thin_images_and_wrong_settings_are_refused(model: Path) -> None:
    spec = read_vision(model)
    if isinstance(spec, ModuleVisionSpec):
        assert (spec.least_tokens, spec.largest_tokens, spec.merge, spec.deep) == (4, 25, 2, (1, 2))
        with pytest.raises(RequestError, match="cannot read an image of 402 x 2 pixels"):
            ModelImages(spec, ModuleProcessor(spec, {})).of_picture(picture(402, 2))
        return
    assert isinstance(spec, QwenVisionSpec)
    assert spec.most_tokens({}) == 30
    assert spec.most_tokens({"max_pixels": 640}) == spec.most_tokens({"size": BOUNDS}) == 10
    images = ModelImages(spec, QwenProcessor(spec, QWEN_PROCESSOR))
    with pytest.raises(RequestError, match="one side over 200 times the other"):
        images.of_picture(picture(402, 2))
    for wrong in ({"min_pixels": 99, "max_pixels": 9}, {"patch_size": 7}, {"do_resize": False}, {"max_pixels": "x"}):
        with pytest.raises(ValueError, match=r"must be|tower"):
            QwenProcessor(spec, QWEN_PROCESSOR | wrong)
