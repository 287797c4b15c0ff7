"""Speculation on a device that runs ahead of the host, as a GPU does: a CPU takes its place, whose steps are staged,
replayed and verified by the same code. `tests/gpu/test_speculation.py` is the same on a card.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.engine.metrics.reader import Counter
from quire.foundation.messages.workers import Plan, Result
from quire.runtime.executor import factory
from quire.runtime.executor.gpu_executor import GpuExecutor
from quire.runtime.worker import buffer_ring
from quire.runtime.worker.speculation.adaptive import AdaptiveDrafter
from quire.runtime.worker.speculation.draft_model import DraftModel
from quire.runtime.worker.speculation.step_drafts import StepDrafts
from quire.runtime.worker.worker import Worker
from quire.runtime.worker.worker_parts import LoadedModel
from tests.checkpoints import VOCAB_SIZE
from tests.heads import ReferenceHead, make_eagle3, noting, proposed
from tests.offline import test_masked_drafts as masked_drafts
from tests.offline.test_speculation import (
    ASKED,
    LIMITS,
    NGRAM,
    SUFFIX,
    answers,
    check_synthetic,
    checkpoint,
    draft,
    expected,
    plain,
    prompts,
)
from tests.offline.test_speculation import test_adapters_are_drafted_for_too as check_adapters
from tests.worker.replay_by_running import ReplayByRunning

__all__ = ["checkpoint", "draft", "expected", "plain"]
pytestmark = pytest.mark.usefixtures("always_drafting")
CAPTURED = 64
LIMITS_AHEAD: dict[str, Any] = {**LIMITS, "max_num_batched_tokens": CAPTURED}


@contextmanager
def running_ahead(
    graphs: list[ReplayByRunning] | None = None, kind: type[ReplayByRunning] = ReplayByRunning
) -> Iterator[None]:
    """Engines have an executor without a thread, on a device with memory of its own. Their graphs are appended."""

    def capture(self: Worker, loaded: LoadedModel) -> None:
        replay = kind.put_into(self._runner)
        self._runner.capture_graphs(CAPTURED)
        if graphs is not None:
            graphs.append(replay)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(factory, "CpuExecutor", lambda config, clock, host_memory: GpuExecutor(config, clock))
        patch.setattr(buffer_ring, "_has_memory", lambda device: True)
        patch.setattr(Worker, "capture_graphs", capture)
        yield


@pytest.fixture(scope="module")
def graphs() -> list[ReplayByRunning]:
    return []


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_eagle3(tmp_path_factory.mktemp("head") / "head", vocab_size=VOCAB_SIZE, draft_vocab=200)


@pytest.fixture(scope="module", params=["ngram", "suffix", "draft_model", "eagle3"])
def ahead(
    request: pytest.FixtureRequest,
    checkpoint: Path,
    draft: Path,
    head: Path,
    plain: LLM,
    graphs: list[ReplayByRunning],
) -> Iterator[LLM]:
    """An engine on it."""
    asked = {"ngram": NGRAM, "suffix": SUFFIX, "draft_model": {"model": str(draft), "num_speculative_tokens": 3}}
    asked["eagle3"] = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3}
    asked = asked[request.param]
    graphs.clear()
    with (
        running_ahead(graphs),
        LLM(str(checkpoint), speculative_config=asked, disable_log_stats=False, **LIMITS_AHEAD) as llm,
    ):
        yield llm


@pytest.mark.parametrize("asked", ASKED)
def test_guessing_ahead_changes_no_output(
    asked: str,
    expected: Callable[[str], list[Any]],
    ahead: LLM,
    graphs: list[ReplayByRunning],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of rows with logits transforms nothing is guessed, of all others it is; and their steps are replayed."""
    launched: list[tuple[int, bool]] = []
    launch = Worker.launch

    def noting(self: Worker, plan: Plan, *others: Any) -> Any:
        handle = launch(self, plan, *others)
        launched.append((plan.step, self._drafter is not None and bool(plan.drafts)))
        return handle

    def drafts() -> float:
        return next(each.value for each in ahead.get_metrics() if each.name.endswith("decode_num_drafts"))  # type: ignore

    monkeypatch.setattr(Worker, "launch", noting)
    before = drafts()
    for replay in graphs:
        replay.replayed.clear()
    assert answers(ahead, ASKED[asked]) == expected(asked)
    transformed = asked in ("penalties", "bias, min_tokens", "choice")
    assert (drafts() > before) is not transformed
    assert any(drafting for _, drafting in launched)
    if not transformed:
        assert any(not shape.is_decode for shape in graphs[0].replayed)
    metrics = {each.name: each.value for each in ahead.get_metrics() if isinstance(each, Counter)}
    assert metrics["vllm:num_preemptions"] > 0


@pytest.mark.parametrize("asked", ["greedy", "seeded", "min_p, n"])
def test_behind_steps_that_run_drafts_are_those_of_the_model_itself(
    asked: str, checkpoint: Path, expected: Callable[[str], list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on from what the step before has sampled, by the same random numbers: so it is always right."""
    following, results = [], list[Result]()
    follows, finish = DraftModel.follows, AdaptiveDrafter.finish

    def noting_follows(self: DraftModel, plan: Plan) -> bool:
        following.append(follows(self, plan))
        return following[-1]

    def noting_results(self: AdaptiveDrafter, result: Result) -> Result:
        results.append(result)
        return finish(self, result)

    monkeypatch.setattr(DraftModel, "follows", noting_follows)
    monkeypatch.setattr(AdaptiveDrafter, "finish", noting_results)
    with (
        running_ahead(),
        LLM(str(checkpoint), speculative_model=str(checkpoint), num_speculative_tokens=3, **LIMITS_AHEAD) as llm,
    ):
        for _ in range(2):  # then prompts are cached
            assert answers(llm, ASKED[asked]) == expected(asked)
    drafted = [(count, own) for each in results for count, own in zip(each.counts, each.drafted, strict=False) if own]
    assert sum(count == 1 + own for count, own in drafted) > 0.98 * len(drafted) > 100
    assert sum(following) > 0.3 * len(following)


def test_drafts_of_the_device_are_those_that_are_made_one_by_one(checkpoint: Path, draft: Path) -> None:
    """By a model that is mostly wrong, so that rows gain now more, now fewer."""
    with running_ahead():
        noted = drafts_by_context(checkpoint, draft, LIMITS_AHEAD)
    check_drafts(noted, draft, LIMITS)


def drafts_by_context(checkpoint: Path, draft: Path, limits: dict[str, Any]) -> dict[tuple[int, ...], list[int]]:
    """What the draft model proposes behind which tokens."""
    noted: dict[tuple[int, ...], list[int]] = {}
    propose = DraftModel.propose

    def noting_drafts(self: DraftModel, plan: Plan, max_read: int) -> StepDrafts:
        drafts = propose(self, plan, max_read)
        noted.update((tuple(tokens), own) for tokens, own in proposed(self, plan, drafts))
        return drafts

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DraftModel, "propose", noting_drafts)
        with LLM(str(checkpoint), speculative_model=str(draft), num_speculative_tokens=3, **limits) as llm:
            answers(llm, ASKED["greedy"])
    return noted


def check_drafts(noted: dict[tuple[int, ...], list[int]], draft: Path, limits: dict[str, Any]) -> None:
    """They are what the draft model itself goes on with, up to ties."""
    assert len(noted) > 100
    some = random.Random(0).sample(sorted(noted), 80)
    greedy = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, detokenize=False)
    with LLM(str(draft), **limits) as alone:
        outputs = alone.generate([{"prompt_token_ids": list(each)} for each in some], greedy, use_tqdm=False)
    right = [
        noted[context] == list(output.outputs[0].token_ids[: len(noted[context])])
        for context, output in zip(some, outputs, strict=True)
    ]
    assert sum(right) >= len(right) - 1


def test_adapters_are_drafted_for_ahead_too(checkpoint: Path, draft: Path, tmp_path: Path) -> None:
    with running_ahead():
        check_adapters(checkpoint, draft, tmp_path)


@pytest.mark.parametrize("asked", ["greedy", "penalties, log probabilities"])
def test_rows_under_a_grammar_have_drafts_beside_others(asked: str) -> None:
    """Of steps with such rows the host is told the drafts; others stay on the device."""
    limits = {**masked_drafts.LIMITS, "max_num_batched_tokens": CAPTURED}
    with LLM(**limits) as plain:
        expected = masked_drafts.answers(plain, masked_drafts.ASKED[asked])
    with running_ahead(), LLM(speculative_model="quill_draft", num_speculative_tokens=4, **limits) as llm:
        assert masked_drafts.answers(llm, masked_drafts.ASKED[asked]) == expected
        assert (masked_drafts.counters(llm)["vllm:spec_decode_num_drafts"] > 20) is (asked == "greedy")


def test_a_benchmark_can_say_how_often_drafts_are_accepted(checkpoint: Path, draft: Path) -> None:
    """Behind replayed steps, whose results the host only reads."""
    with running_ahead():
        check_synthetic(checkpoint, draft)


@pytest.mark.parametrize("ahead", ["eagle3"], indirect=True)
def test_a_head_proposes_what_the_paper_says(ahead: LLM, checkpoint: Path, head: Path) -> None:
    """Also in steps that are padded, and behind steps that were launched before their results were known."""
    with noting(prompts(1)[0][0]) as noted:
        for _ in range(2):  # then prompts are cached
            answers(ahead, ASKED["greedy"])
    noted.check(ReferenceHead(head, checkpoint))
