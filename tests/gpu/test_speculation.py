"""Speculation on a card, end to end: whatever guesses, the output is the one without, token for token in fp32.

A step of several tokens adds up in another order than one of one, so a tie may fall the other way: an output that
differs must be one that the model itself finds as likely, at the first token that differs.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from quire import LLM, SamplingParams
from quire.engine.metrics.reader import Counter
from quire.foundation.messages.workers import Plan
from quire.runtime.worker.graph_shapes import GraphShape, ShapeKind
from quire.runtime.worker.replay import CudaGraphs
from quire.runtime.worker.speculation.draft_model import DraftModel
from quire.runtime.worker.step import Step
from tests.checkpoints import VOCAB_SIZE, make_llama
from tests.heads import ReferenceHead, make_eagle3, noting
from tests.offline.test_drafts_ahead import check_drafts, drafts_by_context
from tests.offline.test_speculation import ASKED, NGRAM, prompts

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("always_drafting")]
LIMITS: dict[str, Any] = {
    "device": "cuda", "dtype": "float32", "max_model_len": 160, "max_num_seqs": 8, "max_num_batched_tokens": 64,
    "block_size": 16, "num_gpu_blocks_override": 26, "disable_log_stats": False,
}  # fmt: skip
"""So few blocks that sequences are preempted."""
TIE = 1e-3
TRANSFORMED = ("penalties", "bias, min_tokens", "choice")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama") / "model")


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> Iterator[LLM]:
    with LLM(str(checkpoint), **LIMITS) as llm:
        yield llm


@pytest.fixture(scope="module", params=["ngram", "itself", "another", "eagle3"])
def guessing(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LLM]:
    """By the text, by the model itself, which is right, and by a model and a head that are nearly always wrong."""
    asked: dict[str, Any] = NGRAM
    if request.param == "eagle3":
        head = make_eagle3(tmp_path_factory.mktemp("head") / "head", vocab_size=VOCAB_SIZE, draft_vocab=200)
        asked = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3}
    elif request.param != "ngram":
        other = checkpoint
        if request.param == "another":
            other = make_llama(tmp_path_factory.mktemp("draft") / "model", layers=1, seed=9)
        asked = {"model": str(other), "num_speculative_tokens": 3}
    with LLM(str(checkpoint), speculative_config=asked, **LIMITS) as llm:
        yield llm


def _verifies(shape: GraphShape) -> bool:
    """Whether it is for steps with drafts alone, or more positions than rows."""
    return shape.is_short or (shape.sampled > shape.max_rows and not shape.is_decode)


def counters(llm: LLM) -> dict[str, float]:
    return {metric.name: metric.value for metric in llm.get_metrics() if isinstance(metric, Counter)}


@pytest.mark.parametrize("asked", ASKED)
def test_guessing_changes_no_output(
    asked: str, plain: LLM, guessing: LLM, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """With chunked prompts, a common prefix that is cached, and too few blocks for all; steps with drafts replay."""
    replayed: list[GraphShape] = []
    replay = CudaGraphs.replay

    def noting(self: CudaGraphs, step: Step) -> Tensor:
        assert step.shape is not None
        replayed.append(step.shape)
        return replay(self, step)

    monkeypatch.setattr(CudaGraphs, "replay", noting)
    params = SamplingParams(**{"max_tokens": 50, "ignore_eos": True, "detokenize": False, "logprobs": 2} | ASKED[asked])
    given: list[Any] = [{"prompt_token_ids": each} for each in prompts(14)]
    before = counters(guessing)
    found = guessing.generate(given, params, use_tqdm=False)
    after = counters(guessing)
    drafts, tokens, accepted = (
        after[f"vllm:spec_decode_num_{name}"] - before[f"vllm:spec_decode_num_{name}"]
        for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    assert after["vllm:num_preemptions"] > 0
    if asked in TRANSFORMED:
        assert drafts == 0
    else:
        assert 0 < drafts <= tokens
        assert any(_verifies(shape) for shape in replayed)
        if "itself" in request.node.name:
            assert accepted > 0.95 * tokens
    for ours, theirs in zip(found, plain.generate(given, params, use_tqdm=False), strict=True):
        for mine, other in zip(ours.outputs, theirs.outputs, strict=True):
            assert mine.finish_reason == other.finish_reason or mine.token_ids != other.token_ids
            assert_same(mine, other, greedy=params.temperature == 0)


def assert_same(mine: Any, other: Any, *, greedy: bool) -> None:
    """Token for token; greedily, up to a tie."""
    if list(mine.token_ids) == list(other.token_ids):
        return
    place = next(i for i, (a, b) in enumerate(zip(mine.token_ids, other.token_ids, strict=False)) if a != b)
    assert greedy, f"token {place} differs"
    entries = other.logprobs[place]
    ours, theirs = (entries.get(token) for token in (mine.token_ids[place], other.token_ids[place]))
    assert ours is not None
    assert abs(ours.logprob - theirs.logprob) < TIE, f"token {place} differs, and is no tie"


def test_a_head_proposes_what_the_paper_says(checkpoint: Path, tmp_path: Path) -> None:
    """In steps that replay graphs and in others; twice, so that prompts are cached."""
    head = make_eagle3(tmp_path / "head", vocab_size=VOCAB_SIZE, draft_vocab=200)
    asked = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3}
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True, detokenize=False)
    given: list[Any] = [{"prompt_token_ids": each} for each in prompts(14)]
    with noting(prompts(1)[0][0]) as noted, LLM(str(checkpoint), speculative_config=asked, **LIMITS) as llm:
        for _ in range(2):
            llm.generate(given, params, use_tqdm=False)
    noted.check(ReferenceHead(head, checkpoint))


def test_drafts_of_the_device_are_those_that_are_made_one_by_one(checkpoint: Path, tmp_path: Path) -> None:
    """By a model that is mostly wrong, so that rows gain now more, now fewer."""
    other = make_llama(tmp_path / "model", layers=1, seed=9)
    check_drafts(drafts_by_context(checkpoint, other, LIMITS), other, LIMITS)


@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_steps_with_drafts_follow_each_other(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sequence of Quill: nearly all of its steps are short ones, launched behind one that runs, and what they
    bring is what there is without drafts."""
    model = {"draft_model": "quill_draft", "eagle3": "quill_eagle3"}[method]
    asked = {"method": method, "model": model, "num_speculative_tokens": 4}
    followed, shapes = list[bool](), list[ShapeKind]()
    follows, replay = DraftModel.follows, CudaGraphs.replay

    def noting_follows(self: DraftModel, plan: Plan) -> bool:
        followed.append(follows(self, plan))
        return followed[-1]

    def noting_replay(self: CudaGraphs, step: Step) -> Tensor:
        assert step.shape is not None
        shapes.append(step.shape.kind)
        return replay(self, step)

    monkeypatch.setattr(DraftModel, "follows", noting_follows)
    monkeypatch.setattr(CudaGraphs, "replay", noting_replay)
    params, texts = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True), []
    for own in ({}, {"speculative_config": asked}):
        with LLM("quill", dtype="float32", device="cuda", max_model_len=512, max_num_seqs=8,
                 num_gpu_blocks_override=200, **own) as llm:  # fmt: skip
            texts.append(llm.generate("The fox and the hen walk to the river. ", params, use_tqdm=False)[0].outputs[0])
            if own:
                assert sum(followed) > 0.9 * len(followed) > 0
                assert shapes.count(ShapeKind.SHORT) > 0.9 * sum(followed)  # which is asked twice a step
    assert texts[0].text == texts[1].text


@pytest.mark.parametrize("method", ["ngram", "draft_model", "eagle3"])
def test_structured_output_of_quill(method: str) -> None:
    """Masks go as far as the drafts."""
    asked: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
    if method == "draft_model":
        asked = {"model": "quill_draft", "num_speculative_tokens": 4}
    if method == "eagle3":
        asked = {"method": "eagle3", "model": "quill_eagle3", "num_speculative_tokens": 4}
    from quire.sampling_params import StructuredOutputsParams

    schema = {"type": "object", "properties": {"names": {"type": "array", "items": {"enum": ["fox", "hen"]},
              "minItems": 4, "maxItems": 6}}, "required": ["names"]}  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=60, structured_outputs=StructuredOutputsParams(json=schema))
    texts = []
    for own in ({}, {"speculative_config": asked}):
        with LLM("quill", dtype="float32", device="cuda", max_model_len=512, max_num_seqs=8,
                 num_gpu_blocks_override=200, disable_log_stats=False, **own) as llm:  # fmt: skip
            outputs = llm.generate(["The fox and the hen. ", "A list: "], params, use_tqdm=False)
            texts.append([output.outputs[0].text for output in outputs])
            if own:
                assert counters(llm)["vllm:spec_decode_num_drafts"] > 0
    assert texts[0] == texts[1]
