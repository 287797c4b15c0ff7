"""Models of transformers answer as transformers does: in chunks, in batches, with several choices, and preempted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.compute.kernels.reference.attention_inputs import NormRopeForm
from quire.foundation.config import environment
from quire.models.fallback import attentions, decoder
from quire.models.spec import read_spec
from tests.checkpoints import make_llama, make_tiny
from tests.models.fallback.checkpoints import CASES, are_greedy, make, prompts

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


@contextmanager
def serving(directory: Path, **settings: Any) -> Iterator[LLM]:
    """Serve a model in chunks of 32 tokens."""
    given = {"dtype": "float32", "device": "cpu", "max_model_len": 128, "max_num_batched_tokens": 32}
    given |= {"max_num_seqs": 4, "kv_cache_memory_bytes": 8 << 20, "skip_tokenizer_init": True}
    given |= {"model_impl": "transformers"}
    llm = LLM(str(directory), **given | settings)
    try:
        yield llm
    finally:
        llm.close()


def tokens_of(llm: LLM, texts: list[list[int]], sampling: SamplingParams = GREEDY) -> list[list[list[int]]]:
    """Return each prompt's choices."""
    found = llm.generate([{"prompt_token_ids": text} for text in texts], sampling)
    return [[list(choice.token_ids) for choice in each.outputs] for each in found]


@pytest.fixture(autouse=True)
def _own_descriptions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "fallback_cache", lambda: tmp_path / "descriptions")


@pytest.mark.parametrize("architecture", CASES)
def test_greedy_tokens(architecture: str, tmp_path: Path) -> None:
    """Several prompts, of which one is longer than a step, and three choices of each."""
    directory, texts = make(tmp_path / "model", architecture), prompts(70, 9, 33)
    spec = read_spec(directory, None, "transformers")
    assert spec.fallback is not None
    assert spec.fallback.tier == CASES[architecture][0], spec.fallback.reason
    with serving(directory) as llm:
        for text, [chosen] in zip(texts, tokens_of(llm, texts), strict=True):
            assert are_greedy(directory, text, chosen)
        several = SamplingParams(n=3, max_tokens=6, temperature=1.0, top_k=1, ignore_eos=True)
        assert all(are_greedy(directory, texts[2], chosen) for chosen in tokens_of(llm, texts[2:], several)[0])


def test_llama_as_native(tmp_path: Path) -> None:
    """The same model, computed either way, has the same tokens and log probabilities, also on a cached prefix."""
    directory, texts = make_llama(tmp_path / "model", tie=True), prompts(70, 9)
    sampling = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True, logprobs=3, prompt_logprobs=1)
    found = []
    for impl in ("quire", "transformers"):
        with serving(directory, model_impl=impl) as llm:
            asked = [{"prompt_token_ids": text} for text in texts]
            first, again = llm.generate(asked, sampling), llm.generate(asked, GREEDY)
            found.append((first, [list(each.outputs[0].token_ids)[:12] for each in again]))
    (native, native_again), (fallback, fallback_again) = found
    assert native_again == fallback_again
    for one, other in zip(native, fallback, strict=True):
        assert list(one.outputs[0].token_ids) == list(other.outputs[0].token_ids)
        for mine, theirs in zip(one.prompt_logprobs[1:], other.prompt_logprobs[1:], strict=True):
            for token, value in mine.items():
                assert theirs[token].logprob == pytest.approx(value.logprob, abs=1e-3)


@pytest.mark.parametrize("architecture", ["BloomForCausalLM", "BioGptForCausalLM", "BambaForCausalLM"])
def test_preempted_sequences_go_on(architecture: str, tmp_path: Path) -> None:
    """With too few blocks for all sequences, each one still has the tokens that it has alone."""
    directory, texts = make(tmp_path / "model", architecture), prompts(40, 41, 42, 43)
    sampling = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    groups = len(read_spec(directory, None, "transformers").kv_groups())
    settings: dict[str, Any] = {"num_gpu_blocks_override": 12 * groups, "max_model_len": 80}
    with serving(directory, **settings, kv_cache_memory_bytes=None) as llm:
        for text, [chosen] in zip(texts, tokens_of(llm, texts, sampling), strict=True):
            assert are_greedy(directory, text, chosen)


def test_sampled_choices_do_not_depend_on_neighbours(tmp_path: Path) -> None:
    directory, texts = make(tmp_path / "model", "Mamba2ForCausalLM"), prompts(20, 30)
    sampling = SamplingParams(n=3, max_tokens=8, temperature=1.0, seed=5, ignore_eos=True)
    with serving(directory) as llm:
        together = tokens_of(llm, texts, sampling)
        assert together == [tokens_of(llm, [text], sampling)[0] for text in texts]
    assert len({tuple(chosen) for chosen in together[0]}) == 3


def test_dummy_weights(tmp_path: Path) -> None:
    directory = make(tmp_path / "model", "BioGptForCausalLM")
    (directory / "model.safetensors").unlink()
    with serving(directory, load_format="dummy") as llm:
        assert len(tokens_of(llm, prompts(5))[0][0]) == 12


def test_bfloat16(tmp_path: Path) -> None:
    directory = make(tmp_path / "model", "DiffLlamaForCausalLM")
    with serving(directory, dtype="bfloat16") as llm:
        assert len(tokens_of(llm, prompts(70))[0][0]) == 12


def test_auto_prefers_own_layers(tmp_path: Path) -> None:
    assert read_spec(make_llama(tmp_path / "llama")).fallback is None
    assert read_spec(make_llama(tmp_path / "llama"), None, "transformers").fallback is not None
    assert read_spec(make_tiny(tmp_path / "diff", "DiffLlamaForCausalLM")).fallback is not None


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM", "CohereForCausalLM"])
def test_attention_modules_are_one_product(architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotation in halves or interleaved, and norms of heads, are found by trying; a kind that is not tried is not."""
    directory, text = make_tiny(tmp_path / "model", architecture), prompts(40)[0]
    numbers, fuse = [], decoder.fuse_attentions
    monkeypatch.setattr(decoder, "fuse_attentions", lambda *given: numbers.append(fuse(*given)) or numbers[-1])
    with serving(directory) as llm:
        assert are_greedy(directory, text, tokens_of(llm, [text])[0][0])
    is_interleaved = architecture == "CohereForCausalLM"
    monkeypatch.setattr(attentions, "_FORMS", (NormRopeForm(interleaved=not is_interleaved),))
    with serving(directory) as llm:
        assert are_greedy(directory, text, tokens_of(llm, [text])[0][0])
    assert numbers == [len(read_spec(directory).layers), 0]


def test_wrongly_fused_attention_is_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, text = make_llama(tmp_path / "model"), prompts(40)[0]
    monkeypatch.setattr(attentions, "_is_equal", lambda *_: True)
    monkeypatch.setattr(attentions, "_FORMS", (NormRopeForm(interleaved=True),))
    with serving(directory) as llm:
        assert are_greedy(directory, text, tokens_of(llm, [text])[0][0])
