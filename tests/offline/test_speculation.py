"""Speculation end to end: whatever guesses, the output is the one without, token for token."""

from __future__ import annotations

import math
import random
import re
import shlex
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, LoRARequest, SamplingParams
from quire.cli.flags import parse_config
from quire.engine.metrics.reader import Counter, Vector
from quire.errors import ConfigError, ModelNotFoundError
from quire.foundation.config import Config
from quire.foundation.messages.workers import MaskedDrafts, Plan, Result, TokenBitmasks
from quire.planning.auto_config import resolve
from quire.runtime.worker.speculation.draft_model import DraftModel
from quire.runtime.worker.speculation.step_drafts import StepDrafts
from quire.runtime.worker.worker import Worker
from quire.scheduling.speculation.ngram_index import NgramIndex
from tests.adapters import make_adapter
from tests.checkpoints import VOCAB_SIZE, make_llama

pytestmark = pytest.mark.usefixtures("always_drafting")
DOCUMENT = Path(__file__).parents[2] / "docs" / "speculation.md"
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
SUFFIX = {"method": "suffix", "num_speculative_tokens": 4}
SYNTHETIC = {**NGRAM, "rejection_sample_method": "synthetic"}
LIMITS: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 160, "max_num_seqs": 6, "max_num_batched_tokens": 48, "block_size": 8,
    "num_gpu_blocks_override": 36,
}  # fmt: skip
"""So few blocks that sequences are preempted."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama") / "model")


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It is wrong about almost everything."""
    return make_llama(tmp_path_factory.mktemp("draft") / "model", layers=1, seed=9)


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> Iterator[LLM]:
    with LLM(str(checkpoint), **LIMITS) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(plain: LLM) -> Callable[[str], list[Any]]:
    """What is answered to one of ASKED without drafts."""
    return cache(lambda asked: answers(plain, ASKED[asked]))


@pytest.fixture(scope="module", params=["ngram", "suffix", "draft_model"])
def guessing(request: pytest.FixtureRequest, checkpoint: Path, draft: Path) -> Iterator[LLM]:
    asked = {"ngram": NGRAM, "suffix": SUFFIX, "draft_model": {"model": str(draft), "num_speculative_tokens": 3}}
    asked = asked[request.param]
    with LLM(str(checkpoint), speculative_config=asked, disable_log_stats=False, **LIMITS) as llm:
        yield llm


def prompts(count: int) -> list[list[int]]:
    """With a common beginning, and runs that come again."""
    rng = random.Random(2)
    stem = [rng.randrange(3, VOCAB_SIZE) for _ in range(20)]
    return [[*stem, *(rng.randrange(3, 9) for _ in range(rng.randint(1, 40)))] for _ in range(count)]


ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.9, "top_p": 0.9, "top_k": 30, "seed": 3},
    "min_p, n": {"temperature": 0.7, "min_p": 0.05, "seed": 4, "n": 3},
    "penalties": {"temperature": 0, "presence_penalty": 0.4, "frequency_penalty": 0.3, "repetition_penalty": 1.1},
    "bias, min_tokens": {"temperature": 0, "logit_bias": {7: 3.0}, "min_tokens": 30, "ignore_eos": False},
    "logprobs, stop": {"temperature": 0, "logprobs": 2, "stop_token_ids": [5, 6, 7, 8, 11]},
    "prompt logprobs": {"temperature": 0, "prompt_logprobs": 1, "max_tokens": 20},
    "choice": {"temperature": 0, "allowed_token_ids": [4, 5, 6, 7]},
}


def answers(llm: LLM, asked: dict[str, Any]) -> list[Any]:
    params = SamplingParams(**{"max_tokens": 50, "ignore_eos": True, "detokenize": False} | asked)
    outputs = llm.generate([{"prompt_token_ids": each} for each in prompts(14)], params, use_tqdm=False)
    return [(choice.token_ids, choice.finish_reason) for output in outputs for choice in output.outputs]


@pytest.mark.parametrize("asked", ASKED)
def test_guessing_changes_no_output(asked: str, expected: Callable[[str], list[Any]], guessing: LLM) -> None:
    """With chunked prompts, a common prefix that is cached, and too few blocks for all."""
    assert answers(guessing, ASKED[asked]) == expected(asked)
    metrics = guessing.get_metrics()
    counters = {metric.name: metric.value for metric in metrics if isinstance(metric, Counter)}
    (by_place,) = [metric.values for metric in metrics if isinstance(metric, Vector)]
    assert counters["vllm:num_preemptions"] > 0
    assert counters["vllm:prefix_cache_hits"] > 0
    drafts, tokens = counters["vllm:spec_decode_num_drafts"], counters["vllm:spec_decode_num_draft_tokens"]
    assert 0 < drafts <= tokens <= 4 * drafts
    assert sum(by_place) == counters["vllm:spec_decode_num_accepted_tokens"] < tokens
    assert by_place == sorted(by_place, reverse=True)


def test_earlier_outputs_are_guessed_for_who_may_see_them(checkpoint: Path) -> None:
    """The text alone guesses little of what is at random; with what was answered before nearly all of it is right."""
    draw, params = random.Random(5), SamplingParams(temperature=1.0, seed=1, max_tokens=48, ignore_eos=True)
    prompt = [draw.randrange(3, VOCAB_SIZE) for _ in range(20)]
    with LLM(str(checkpoint), speculative_config=SUFFIX, disable_log_stats=False, **LIMITS) as llm:
        accepted = [0.0]
        for salt in ("mine", "mine", "theirs"):
            llm.generate([{"prompt_token_ids": prompt, "cache_salt": salt}], params, use_tqdm=False)
            counters = {each.name: each.value for each in llm.get_metrics() if isinstance(each, Counter)}
            accepted.append(counters["vllm:spec_decode_num_accepted_tokens"])
    first, again, elsewhere = (after - before for before, after in pairwise(accepted))
    assert first < 10
    assert again > 30
    assert elsewhere == first


@pytest.mark.parametrize("right", [False, True])
def test_neither_do_wrong_guesses_or_right_ones(
    right: bool, checkpoint: Path, plain: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(1)
    asked = ASKED["greedy"]
    expected = answers(plain, asked)
    whole = [[*prompt, *tokens] for prompt, (tokens, _) in zip(prompts(14), expected, strict=True)]

    def propose(self: NgramIndex, most: int) -> list[int]:
        length = len(self.tokens)
        if right:
            return next(text[length : length + most] for text in whole if text[:length] == self.tokens)
        return [rng.randrange(VOCAB_SIZE) for _ in range(most)]

    monkeypatch.setattr(NgramIndex, "propose", propose)
    with LLM(str(checkpoint), speculative_config=NGRAM, **LIMITS) as llm:
        assert answers(llm, asked) == expected


@pytest.mark.parametrize("asked", ["greedy", "seeded", "min_p, n"])
def test_a_draft_model_that_is_the_model_itself_is_always_right(
    asked: str, checkpoint: Path, expected: Callable[[str], list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its keys stand where they must, whoever had the blocks before; and both draw by the same random numbers."""
    results: list[Result] = []
    execute = Worker.execute

    def noted(
        self: Worker,
        plan: Plan,
        masks: Callable[[], TokenBitmasks] | None = None,
        drafted: Callable[[MaskedDrafts], None] | None = None,
    ) -> Result:
        result = execute(self, plan, masks, drafted)
        if any(result.drafted):
            results.append(result)
        return result

    monkeypatch.setattr(Worker, "execute", noted)
    with LLM(str(checkpoint), speculative_model=str(checkpoint), num_speculative_tokens=3, **LIMITS) as llm:
        assert answers(llm, ASKED[asked]) == expected(asked)
        for result in results:
            assert result.counts == [1 + drafted for drafted in result.drafted]
        assert sum(map(len, (result.counts for result in results))) > 50
        results.clear()
        assert answers(llm, ASKED[asked]) == expected(asked)  # now prompts are cached
        assert all(result.counts == [1 + drafted for drafted in result.drafted] for result in results)


def test_a_draft_model_forgets_what_was_rejected(checkpoint: Path, plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's own drafts, which know nothing of the request's penalties: each is what it says alone."""
    noted: dict[tuple[int, ...], list[int]] = {}
    propose = DraftModel.propose

    def noting(self: DraftModel, plan: Plan, max_read: int) -> StepDrafts:
        found = propose(self, plan, max_read)
        for place, first in enumerate((found.counts.cumsum() - found.counts).tolist()):
            if found.counts[place]:
                tokens = self._sequences[plan.slots[plan.sampled_rows[place]]].tokens
                noted[tuple(tokens)] = found.tokens[first : first + found.counts[place]].tolist()
        return found

    monkeypatch.setattr(DraftModel, "propose", noting)
    with LLM(str(checkpoint), speculative_model=str(checkpoint), num_speculative_tokens=3, **LIMITS) as llm:
        assert answers(llm, ASKED["penalties"]) == answers(plain, ASKED["penalties"])
    assert len(noted) > 20
    some = random.Random(0).sample(sorted(noted), min(len(noted), 80))
    greedy = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, detokenize=False)
    alone = plain.generate([{"prompt_token_ids": list(each)} for each in some], greedy, use_tqdm=False)
    for context, output in zip(some, alone, strict=True):
        assert noted[context] == output.outputs[0].token_ids[: len(noted[context])]


def accepted_shares(llm: LLM) -> list[float]:
    """By position, of how many rows with drafts the one there and all before it were accepted."""
    metrics = llm.get_metrics()
    (by_place,) = [metric.values for metric in metrics if isinstance(metric, Vector)]
    drafts = next(m.value for m in metrics if isinstance(m, Counter) and m.name == "vllm:spec_decode_num_drafts")
    return [accepted / drafts for accepted in by_place]


def check_synthetic(checkpoint: Path, draft: Path) -> None:
    """Drafts of a model that is nearly always wrong are accepted as often as asked."""
    rates = [0.8, 0.4, 0.0]
    asked = {"model": str(draft), "num_speculative_tokens": 3, "rejection_sample_method": "synthetic"}
    given: list[Any] = [{"prompt_token_ids": each} for each in prompts(6)]
    params = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True, detokenize=False)
    limits = {**LIMITS, "num_gpu_blocks_override": 140, "max_num_batched_tokens": 64, "disable_log_stats": False}
    with LLM(str(checkpoint), speculative_config=asked | {"synthetic_acceptance_rates": rates}, **limits) as llm:
        for _ in range(3):
            outputs = llm.generate(given, params, use_tqdm=False)
            assert {len(each.outputs[0].token_ids) for each in outputs} == {90}
        shares = accepted_shares(llm)
    assert [*shares, 0.0][:3] == pytest.approx(rates, abs=0.08)  # four deviations


def test_a_benchmark_can_say_how_often_drafts_are_accepted(checkpoint: Path, draft: Path) -> None:
    check_synthetic(checkpoint, draft)


def test_adapters_are_drafted_for_too(checkpoint: Path, draft: Path, tmp_path: Path) -> None:
    """By the base model's guesses: rows of two adapters and of none in one step."""
    paths = [make_adapter(tmp_path / str(number), checkpoint, seed=number, rank=4) for number in (1, 2)]
    requests = [None, *(LoRARequest(f"a{number}", number + 1, str(path)) for number, path in enumerate(paths))]
    own: dict[str, Any] = {**LIMITS, "enable_lora": True, "max_loras": 2, "disable_log_stats": False}
    outputs, params = [], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False)
    for asked in ({}, {"speculative_config": NGRAM}, {"speculative_model": str(draft), "num_speculative_tokens": 2}):
        with LLM(str(checkpoint), **own, **asked) as llm:
            given: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts(6)]
            found = llm.generate(given, params, use_tqdm=False, lora_request=requests * 2)
            outputs.append([each.outputs[0].token_ids for each in found])
            drafts = [metric for metric in llm.get_metrics() if metric.name == "vllm:spec_decode_num_drafts"]
            assert bool(asked) == any(metric.value for metric in drafts if isinstance(metric, Counter))
    assert outputs[1] == outputs[2] == outputs[0]


@pytest.mark.parametrize("line", re.findall(r"^quire serve (.*)$", DOCUMENT.read_text(), re.M))
def test_the_commands_of_the_documentation_are_understood(line: str) -> None:
    config = parse_config(shlex.split(line), "quire serve", "").with_values(device="cpu", max_model_len=256)
    speculation = resolve(config).config.speculation.speculation
    assert speculation is not None
    assert speculation.tokens in (4, 5)


def test_a_draft_model_of_other_tokens_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    other = make_llama(tmp_path / "other", vocab_size=VOCAB_SIZE + 8, layers=1)
    with pytest.raises(ConfigError, match="has other tokens than the model"):
        LLM(str(checkpoint), speculative_model=str(other), num_speculative_tokens=3)


def test_what_cannot_be_meant_is_refused_by_name(checkpoint: Path) -> None:
    for asked, said in (
        ({"method": "eagle", "model": "x", "num_speculative_tokens": 3}, "'eagle' comes in a later version"),
        ({"method": "eagle3", "num_speculative_tokens": 3}, '"method": "eagle3" needs a "model"'),
        ({"method": "magic"}, "'magic' is no method"),
        ({"num_speculative_tokens": 3}, 'give a "method"'),
        ({"method": "ngram"}, "num_speculative_tokens is missing"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "from 1 to 16, got 0"),
        ({**NGRAM, "prompt_lookup_min": 9}, "prompt_lookup_min 9 is more than prompt_lookup_max 3"),
        ({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 0}, "prompt_lookup_min must be"),
        ({**NGRAM, "model": "quill_draft"}, '"method": "ngram" takes no "model", got \'quill_draft\''),
        ({**SUFFIX, "model": "quill_draft"}, '"method": "suffix" takes no "model"'),
        ({**NGRAM, "prompt_lookup_mix": 2}, "not supported. Did you mean 'prompt_lookup_min'?"),
        (
            {**NGRAM, "suffix_decoding_max_tree_depth": 9},
            'suffix_decoding_max_tree_depth belongs to "method": "suffix"',
        ),
        ({**SUFFIX, "prompt_lookup_max": 2}, 'prompt_lookup_max belongs to "method": "ngram"'),
        ({**SUFFIX, "suffix_decoding_max_tree_depth": 1}, "at least 2, got 1"),
        ({**SUFFIX, "suffix_decoding_max_spec_factor": 0}, "above 0, got 0"),
        ({**SUFFIX, "suffix_decoding_min_token_prob": 1.5}, "from 0 to 1, got 1.5"),
        ({**NGRAM, "rejection_sample_method": "block"}, "must be 'standard' or 'synthetic', got 'block'"),
        ({**NGRAM, "synthetic_acceptance_length": 2}, 'belongs to "rejection_sample_method": "synthetic"'),
        ({**NGRAM, "rejection_sample_method": "synthetic"}, "give either synthetic_acceptance_rates or"),
        ({**SYNTHETIC, "synthetic_acceptance_length": 5.1}, "a number from 1 to 5, got 5.1"),
        ({**SYNTHETIC, "synthetic_acceptance_length": math.nan}, "a number from 1 to 5, got nan"),
        ({**SYNTHETIC, "synthetic_acceptance_rates": [0.5] * 3}, "a list of 4 numbers"),
        ({**SYNTHETIC, "synthetic_acceptance_rates": [0.5, 0.6, 0, 0]}, "between 0 and 1 and not rise"),
        ({**SYNTHETIC, "synthetic_acceptance_rates": [1.1, 0.6, 0, 0]}, "between 0 and 1 and not rise"),
        ({**SYNTHETIC, "synthetic_acceptance_rates": [0.9, math.nan, 0, 0]}, "between 0 and 1 and not rise"),
        ({**NGRAM, "disable_by_batch_size": 4}, "'disable_by_batch_size' is not supported"),
        ({**NGRAM, "draft_tensor_parallel_size": 2}, "draft_tensor_parallel_size must be 1"),
        ({}, 'give a "method" (ngram or suffix or draft_model or eagle3 or mtp) or a "model"'),
        ({"method": None}, 'give a "method"'),
    ):
        with pytest.raises(ConfigError) as refused:
            LLM(str(checkpoint), speculative_config=asked)
        assert said in refused.value.message
        assert refused.value.param == "speculative_config"
    with pytest.raises(ModelNotFoundError, match=r"not/there' is neither .*: check --speculative-config"):
        LLM(str(checkpoint), speculative_model="./not/there", num_speculative_tokens=3)
    on_gpus = Config().with_values(speculative_config=NGRAM).speculation
    on_gpus.check_device("cuda", 1)
    for ranks, stages in ((2, 1), (1, 2)):
        with pytest.raises(ConfigError, match="several GPUs"):
            on_gpus.check_device("cuda", ranks, stages)
    with pytest.raises(ConfigError, match="3 for num_speculative_tokens, and its own flag says 2"):
        LLM(str(checkpoint), speculative_config={**NGRAM, "num_speculative_tokens": 3}, num_speculative_tokens=2)
