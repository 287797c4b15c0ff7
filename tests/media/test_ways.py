"""Images beside everything else that an engine does: each answer equals that of one rank alone."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import LLM, LoRARequest, SamplingParams
from quire.errors import RequestError
from tests.media.checkpoints import QWEN_IMAGE, make_qwen, picture

LIMITS: dict[str, Any] = {
    "dtype": "float32", "block_size": 8, "max_model_len": 160, "max_num_seqs": 8, "max_num_batched_tokens": 24,
    "num_gpu_blocks_override": 64,
}  # fmt: skip
PICTURES = ((60, 44, 0), (20, 90, 1), (33, 33, 2))
REPEATS = "one two one two one two"


class Model:
    """A checkpoint, and what one rank that does nothing else answers about images."""

    def __init__(self, directory: Path, image: str) -> None:
        self.directory = directory
        pictures = [picture(*each) for each in PICTURES]
        first, second, third = pictures
        self.prompts: list[Any] = [
            {"prompt": f"{image} What is your name?", "multi_modal_data": {"image": first}},
            {"prompt": f"{REPEATS} {image} {REPEATS} {image}", "multi_modal_data": {"image": [second, third]}},
            "The quick brown fox",
            {"prompt": f"{image}{image}{image} Hello", "multi_modal_data": {"image": pictures}},
        ]
        with self.llm() as llm:
            self.expected = answers(llm, self.prompts)

    def llm(self, **settings: Any) -> LLM:
        return LLM(str(self.directory), **(LIMITS | settings))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Qwen's positions tell rows and columns, and its images have any size."""
    return Model(make_qwen(tmp_path_factory.mktemp("ways") / "model", "2_5"), QWEN_IMAGE)


def answers(llm: LLM, prompts: Sequence[Any], lora: LoRARequest | None = None) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    found = llm.generate(list(prompts), params, use_tqdm=False, lora_request=lora)
    return [list(each.outputs[0].token_ids) for each in found]


@pytest.mark.parametrize("ranks", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_ranks_see_the_same_images(model: Model, ranks: dict[str, int]) -> None:
    with model.llm(device="cpu", **ranks) as llm:
        assert answers(llm, model.prompts) == model.expected
        assert answers(llm, model.prompts) == model.expected  # from the prefix cache


@pytest.mark.usefixtures("always_drafting")
@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_drafts_beside_images_change_no_token(model: Model, method: str) -> None:
    asked: dict[str, Any] = {"num_speculative_tokens": 3, "method": method}
    asked |= {"prompt_lookup_min": 1} if method == "ngram" else {"model": str(model.directory)}
    with model.llm(speculative_config=asked, disable_log_stats=False) as llm:
        assert answers(llm, model.prompts) == model.expected
        drafted = {each.name: each for each in llm.get_metrics()}["vllm:spec_decode_num_draft_tokens"]
        assert drafted.value > 0


Asked = tuple[str, tuple[int, ...]]
"""A text, and which pictures are in it."""


def mixed(image: str) -> list[Asked]:
    """Requests that differ in their text alone, in their images alone, in the order of these, or only behind a long
    common beginning; some have no image."""
    stem = f"{REPEATS} {REPEATS} {image} {REPEATS}"
    one = [(text, (number,)) for text in (f"{image} Hello", stem, f"{stem} and more") for number in range(10)]
    two = [(f"{image}{REPEATS}{image}", pair) for pair in ((0, 1), (1, 0), (0, 0), (2, 3), (3, 2), (4, 5))]
    return [*one, *two, *((f"{REPEATS} {word}", ()) for word in ("Hello", "and", "more"))]


def ask(llm: LLM, image: str, order: Sequence[Asked], pictures: Sequence[Any]) -> list[tuple[int, ...]]:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    prompts = [
        {"prompt": text, "multi_modal_data": {"image": [pictures[number] for number in numbers]}}
        for text, numbers in order
    ]
    return [tuple(each.outputs[0].token_ids) for each in llm.generate(prompts, params, use_tqdm=False)]


@pytest.mark.parametrize("count", [100, pytest.param(1_000, marks=pytest.mark.long("engine"))])
def test_no_answer_saw_the_image_of_another_request(model: Model, count: int) -> None:
    """Few blocks and an encoder cache of a few images: requests are preempted, and images computed again."""
    pictures = [picture(20 + 9 * number, 60 - 4 * number, 40 + number) for number in range(10)]
    asked = mixed(QWEN_IMAGE)
    with model.llm(enable_prefix_caching=False, max_num_seqs=1) as llm:
        alone = dict(zip(asked, ask(llm, QWEN_IMAGE, asked, pictures), strict=True))
    assert len({answer for (text, numbers), answer in alone.items() if len(numbers) == 1}) > 20  # images differ
    order = [asked[place] for place in np.random.default_rng(count).integers(0, len(asked), count)]
    with model.llm(num_gpu_blocks_override=40, disable_log_stats=False) as llm:
        found = ask(llm, QWEN_IMAGE, order, pictures)
        counts = {metric.name: metric for metric in llm.get_metrics()}
    assert [place for place, each in enumerate(order) if found[place] != alone[each]] == []
    assert counts["vllm:prefix_cache_hits"].value > 0
    assert counts["vllm:mm_cache_queries"].value > counts["vllm:mm_cache_hits"].value > 0


def test_what_is_swapped_out_keeps_its_images(model: Model) -> None:
    few = {"num_gpu_blocks_override": 21, "swap_space": 0.01, "preemption_mode": "swap", "max_num_batched_tokens": 64}
    with model.llm(**few, enable_prefix_caching=False, disable_log_stats=False) as llm:
        assert answers(llm, model.prompts * 2) == model.expected * 2
        assert {each.name: each for each in llm.get_metrics()}["vllm:num_preemptions"].value > 0


def adapted(model: Path, directory: Path, modules: str) -> tuple[Path, Path]:
    """Write an adapter of these modules as PEFT saves it, and the model that it changes into."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForImageTextToText

    base = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32)
    changed = get_peft_model(base, LoraConfig(r=4, lora_alpha=16, target_modules=modules))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in changed.named_parameters():
            if "lora_" in name:
                parameter.normal_(0.0, 0.2, generator=generator)
    changed.save_pretrained(str(directory / "adapter"))
    shutil.copytree(model, directory / "merged")
    changed.merge_and_unload().save_pretrained(directory / "merged")
    return directory / "adapter", directory / "merged"


def test_an_adapter_of_the_text_model_serves_beside_images(model: Model, tmp_path: Path) -> None:
    adapter, merged = adapted(model.directory, tmp_path, r".*language_model.*\.(q_proj|v_proj|down_proj)")
    with LLM(str(merged), **LIMITS) as llm:
        expected = answers(llm, model.prompts)
    with model.llm(enable_lora=True, max_lora_rank=8) as llm:
        assert answers(llm, model.prompts, LoRARequest("a", 1, str(adapter))) == expected != model.expected
        assert answers(llm, model.prompts) == model.expected
        tower = r".*visual.*\.qkv"
        of_tower, _ = adapted(model.directory, tmp_path / "tower", tower)
        with pytest.raises(RequestError, match="visual"):
            answers(llm, model.prompts[:1], LoRARequest("b", 2, str(of_tower)))
