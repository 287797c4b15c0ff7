"""Answers about sounds by Qwen2-Audio, Qwen3-ASR and Voxtral, compared with transformers' `generate` in fp32."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import LLM, SamplingParams
from quire.errors import RequestError
from tests.media.sound_checkpoints import MARKS, RATE, file_of_sound, make_hearing, sound

NEW_TOKENS = 32
SECONDS: tuple[tuple[float, ...], ...] = ((), (0.9,), (1.7, 0.4), (0.3, 0.8))
TEXTS = ("The quick brown fox", "{0} What is your name?", "one two {0} three {0}", "{0}{0} Hello")


def sounds(seconds: Sequence[float]) -> list[Any]:
    return [sound(each, seed) for seed, each in enumerate(seconds)]


@pytest.fixture(scope="module", params=list(MARKS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hearing(tmp_path_factory.mktemp(kind) / "model", kind)


@pytest.fixture(scope="module")
def expected(model: Path, kind: str) -> list[list[int]]:
    return [reference(model, kind, text, sounds(each)) for text, each in zip(TEXTS, SECONDS, strict=True)]


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), dtype="float32", max_num_batched_tokens=7, block_size=8) as llm:
        yield llm


def reference(model: Path, kind: str, text: str, given: list[Any]) -> list[int]:
    """What transformers' feature extractor and model make of a prompt, with as many tokens as the class counts."""
    import torch
    import transformers
    from transformers import AutoConfig, AutoFeatureExtractor, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    reader = getattr(transformers, AutoConfig.from_pretrained(model).architectures[0]).from_pretrained(
        model, dtype=torch.float32
    )
    inputs: dict[str, Any] = {}
    if given:
        extractor = AutoFeatureExtractor.from_pretrained(model)
        options: dict[str, Any] = {"sampling_rate": RATE, "return_attention_mask": True, "return_tensors": "pt"}
        if kind == "voxtral":
            found = extractor(given, padding=True, pad_to_multiple_of=30 * RATE, truncation=False, **options)
            inputs, counts = {"input_features": found["input_features"]}, [375] * len(given)
        elif kind == "qwen2_audio":
            found = extractor(given, padding="max_length", **options)
            inputs = {"input_features": found["input_features"], "feature_attention_mask": found["attention_mask"]}
            lengths = found["attention_mask"].sum(-1)
            counts = reader.model.audio_tower._get_feat_extract_output_lengths(lengths)[1].tolist()
        else:
            found = extractor(given, **options)
            inputs = {"input_features": found["input_features"], "input_features_mask": found["attention_mask"]}
            counts = [vectors_of_asr(frames) for frames in found["attention_mask"].sum(-1).tolist()]
        for count in counts:
            text = text.replace("{0}", "{1}" * count, 1)
    ids = tokenizer(text.replace("{1}", MARKS[kind]), return_tensors="pt")["input_ids"]
    with torch.no_grad():
        out = reader.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), **inputs, max_new_tokens=NEW_TOKENS, do_sample=False,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
    return [int(each) for each in out[0, ids.shape[1] :]]


def vectors_of_asr(frames: int) -> int:
    """13 vectors of each whole second, and an eighth of the frames of the last part, rounded up three times."""
    rest = frames % 100
    for _ in range(3):
        rest = (rest + 1) // 2
    return frames // 100 * 13 + rest


def prompt(kind: str, text: str, seconds: Sequence[float]) -> dict[str, Any]:
    data = {"audio": [(each, RATE) for each in sounds(seconds)]}
    return {"prompt": text.replace("{0}", MARKS[kind]), "multi_modal_data": data}


def greedy(llm: LLM, prompts: Sequence[Any]) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    return [list(each.outputs[0].token_ids) for each in llm.generate(list(prompts), params, use_tqdm=False)]


def test_answers_equal_those_of_transformers_with_0_to_2_sounds(llm: LLM, kind: str, expected: list[list[int]]) -> None:
    prompts = [prompt(kind, text, seconds) for text, seconds in zip(TEXTS, SECONDS, strict=True)]
    assert greedy(llm, prompts) == expected
    assert greedy(llm, prompts) == expected  # from the prefix cache


def test_preempted_requests_hear_their_sounds_again(model: Path, kind: str, expected: list[list[int]]) -> None:
    """Room for two long sequences only, without a prefix cache: others are computed anew, in chunks of other sizes."""
    blocks = 196 if kind == "voxtral" else 30
    with LLM(
        str(model), dtype="float32", block_size=8, num_gpu_blocks_override=blocks, enable_prefix_caching=False,
        max_model_len=900 if kind == "voxtral" else 160, preemption_mode="recompute", disable_log_stats=False,
    ) as llm:  # fmt: skip
        prompts = [prompt(kind, text, seconds) for text, seconds in zip(TEXTS, SECONDS, strict=True)] * 2
        assert greedy(llm, prompts) == expected * 2
        counts = {metric.name: metric for metric in llm.get_metrics()}
        assert counts["vllm:num_preemptions"].value > 0


def test_another_sound_never_hits_the_prefix_cache_and_the_same_sound_does(llm: LLM, kind: str) -> None:
    text, params = f"{MARKS[kind]} The answer is 42.", SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    first, other, again = (
        llm.generate({"prompt": text, "multi_modal_data": {"audio": sound(0.9, seed)}}, params, use_tqdm=False)[0]
        for seed in (10, 11, 10)
    )
    assert other.num_cached_tokens == 0
    assert again.num_cached_tokens == (len(again.prompt_token_ids or ()) - 1) // 8 * 8
    assert again.outputs[0].token_ids == first.outputs[0].token_ids


def test_a_conversation_hears_files_and_samples_as_a_prompt_does(llm: LLM, kind: str) -> None:
    samples = np.round(sound(0.9) * 2**15) / 2**15  # as a file of 16 bits has them
    data = base64.b64encode(file_of_sound(samples)).decode()
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    asked = f"<|im_start|>user\n{MARKS[kind]}What?<|im_end|>\n<|im_start|>assistant\n"
    (same,) = llm.generate({"prompt": asked, "multi_modal_data": {"audio": samples}}, params, use_tqdm=False)
    for part in (
        {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{data}"}},
        {"type": "audio", "audio": (samples, RATE)},
    ):
        (found,) = llm.chat([{"role": "user", "content": [part, {"type": "text", "text": "What?"}]}], params,
                            use_tqdm=False)  # fmt: skip
        assert found.outputs[0].token_ids == same.outputs[0].token_ids


def test_sounds_that_are_too_long_too_short_or_none_are_refused(llm: LLM, kind: str) -> None:
    longest = {"qwen2_audio": "30 seconds", "qwen3_asr": "150 seconds", "voxtral": "150 seconds"}[kind]
    refused: list[tuple[Any, str]] = [
        (sound(0.05), "has from 0.1 to"),
        (np.zeros(151 * RATE, np.float32), longest),
        (np.zeros((2, RATE), np.float32), "an array"),
        (np.full(RATE, np.nan, np.float32), "finite"),
        ((sound(1), 0), "a second"),
        (["x"], "no URL of a sound"),
    ]
    for given, message in refused:
        asked = {"prompt": MARKS[kind], "multi_modal_data": {"audio": given}}
        with pytest.raises(RequestError, match=message):
            llm.generate(asked, use_tqdm=False)
    with pytest.raises(RequestError, match="2 placeholders for sounds and 1 sounds"):
        llm.generate({"prompt": MARKS[kind] * 2, "multi_modal_data": {"audio": sound(1)}}, use_tqdm=False)
    with pytest.raises(RequestError, match="reads text and sounds alone: leave images out"):
        llm.generate({"prompt": "a", "multi_modal_data": {"image": "data:,a"}}, use_tqdm=False)
