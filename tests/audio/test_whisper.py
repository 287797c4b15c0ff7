"""Whisper's tokens and logits, compared with transformers in fp32."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from quire import LLM, SamplingParams
from quire.errors import ConfigError, RequestError
from tests.audio.checkpoints import IDS, NO_TIMESTAMPS, RATE, SECONDS, START, make_whisper, sound

if TYPE_CHECKING:
    from torch import Tensor

    from tests.audio.checkpoints import Samples

NEW_TOKENS = 30
SHORT = [START, IDS["<|en|>"], IDS["<|transcribe|>"], NO_TIMESTAMPS]
LONG = [IDS["<|startofprev|>"], *range(20, 40), *SHORT]
PROMPTS = (SHORT, LONG, SHORT, LONG, SHORT)
SOUNDS = tuple(sound(SECONDS * (0.5 + 0.1 * seed), seed=seed) for seed in range(5))
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_whisper(tmp_path_factory.mktemp("whisper") / "model")


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    """Steps of 7 tokens, so that prompts are computed in several."""
    sizes: dict[str, Any] = {"max_num_batched_tokens": 7, "block_size": 8, "max_num_seqs": 4}
    with LLM(str(model), dtype="float32", logprobs_mode="raw_logits", max_logprobs=-1, **sizes) as llm:
        yield llm


def heard(tokens: Sequence[int], samples: Samples) -> dict[str, Any]:
    return {"prompt_token_ids": list(tokens), "multi_modal_data": {"audio": (samples, RATE)}}


def reference(model: Path, tokens: Sequence[int], samples: Samples) -> tuple[list[int], Tensor]:
    """The likeliest tokens behind a prompt by transformers, and the logits [tokens, vocab] that they are of."""
    import torch
    from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

    reader = WhisperForConditionalGeneration.from_pretrained(model, dtype=torch.float32).eval()
    extractor = WhisperFeatureExtractor.from_pretrained(model)
    features = extractor(samples, sampling_rate=RATE, return_tensors="pt").input_features
    ids, logits = torch.tensor([tokens]), []
    with torch.no_grad():
        states = reader.model.encoder(features)
        for _ in range(NEW_TOKENS):
            logits.append(reader(encoder_outputs=states, decoder_input_ids=ids).logits[0, -1])
            ids = torch.cat((ids, logits[-1].argmax().view(1, 1)), dim=1)
    return ids[0, len(tokens) :].tolist(), torch.stack(logits)


@pytest.fixture(scope="module")
def expected(model: Path) -> list[tuple[list[int], Tensor]]:
    return [reference(model, tokens, SOUNDS[place]) for place, tokens in enumerate(PROMPTS)]


@pytest.fixture(scope="module")
def prompts() -> list[dict[str, Any]]:
    return [heard(tokens, SOUNDS[place]) for place, tokens in enumerate(PROMPTS)]


def test_tokens_and_logits_are_those_of_transformers(
    llm: LLM, prompts: list[dict[str, Any]], expected: list[tuple[list[int], Tensor]]
) -> None:
    import torch

    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=-1)
    for output, (tokens, logits) in zip(llm.generate(prompts, params, use_tqdm=False), expected, strict=True):
        own = output.outputs[0]
        assert list(own.token_ids) == tokens
        assert own.logprobs is not None
        made = torch.tensor([[each[token].logprob for token in range(logits.shape[1])] for each in own.logprobs])
        assert (made - logits).abs().max() <= 1e-4 * logits.abs().max()
    assert len({tuple(tokens) for tokens, _ in expected}) == 5, "what is heard decides what is said"


def test_a_prefix_is_found_again_by_its_sound_alone(llm: LLM, expected: list[tuple[list[int], Tensor]]) -> None:
    again, other = llm.generate([heard(LONG, SOUNDS[1]), heard(LONG, sound(seed=9))], GREEDY, use_tqdm=False)
    assert again.num_cached_tokens == 24
    assert list(again.outputs[0].token_ids) == expected[1][0]
    assert other.num_cached_tokens == 0
    assert list(other.outputs[0].token_ids) != expected[1][0]


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preempted_sequences_hear_on(
    model: Path, mode: str, prompts: list[dict[str, Any]], expected: list[tuple[list[int], Tensor]]
) -> None:
    sizes = {"block_size": 8, "num_gpu_blocks_override": 12, "max_num_seqs": 4}
    with LLM(str(model), dtype="float32", preemption_mode=mode, disable_log_stats=False, **sizes) as tight:
        outputs = tight.generate(prompts, GREEDY, use_tqdm=False)
        assert any(getattr(metric, "value", 0) for metric in tight.get_metrics() if "preemptions" in metric.name)
    assert [list(each.outputs[0].token_ids) for each in outputs] == [tokens for tokens, _ in expected]


def test_sequences_of_one_prompt_hear_the_same(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=NEW_TOKENS, ignore_eos=True)
    first, again = (llm.generate(heard(LONG, SOUNDS[2]), params, use_tqdm=False)[0] for _ in range(2))
    texts = [list(each.token_ids) for each in first.outputs]
    assert texts == [list(each.token_ids) for each in again.outputs]
    assert len({tuple(text) for text in texts}) == 3


@pytest.mark.parametrize("data", [None, {"image": 1}, {"audio": sound(SECONDS + 0.1)}, {"audio": "a.wav"}])
def test_what_cannot_be_heard_is_refused(llm: LLM, data: Any) -> None:
    prompt = {"prompt_token_ids": SHORT} | ({} if data is None else {"multi_modal_data": data})
    with pytest.raises(RequestError, match=r"audio|Audio"):
        llm.generate(prompt, GREEDY, use_tqdm=False)


def test_settings_that_are_not_served_are_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match="divided over ranks"):
        LLM(str(model), tensor_parallel_size=2)
