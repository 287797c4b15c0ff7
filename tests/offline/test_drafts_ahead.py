"""Speculation on a device that runs ahead of the host, as a GPU does: a CPU takes its place, whose steps are staged,
replayed and verified by the same code. `tests/gpu/test_speculation.py` is the same on a card.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from quire import LLM
from quire.executor import factory
from quire.executor.gpu_executor import GpuExecutor
from quire.messages import Plan
from quire.metrics.reader import Counter
from quire.worker import buffer_ring
from quire.worker.worker import LoadedModel, Worker
from tests.checkpoints import VOCAB_SIZE
from tests.heads import ReferenceHead, make_eagle3, noting
from tests.offline.test_speculation import (
    ASKED,
    LIMITS,
    NGRAM,
    SUFFIX,
    answers,
    check_synthetic,
    checkpoint,
    draft,
    plain,
    prompts,
)
from tests.worker.replay_by_running import ReplayByRunning

__all__ = ["checkpoint", "draft", "plain"]
pytestmark = pytest.mark.usefixtures("always_drafting")
CAPTURED = 64
LIMITS_AHEAD: dict[str, Any] = {**LIMITS, "max_num_batched_tokens": CAPTURED}


@contextmanager
def running_ahead(graphs: list[ReplayByRunning] | None = None) -> Iterator[None]:
    """Engines have an executor without a thread, on a device with memory of its own. Their graphs are appended."""

    def capture(self: Worker, loaded: LoadedModel) -> None:
        self._runner._graphs = replay = ReplayByRunning()  # type: ignore[assignment]
        self._runner.capture_graphs(CAPTURED)
        if graphs is not None:
            graphs.append(replay)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(factory, "CpuExecutor", GpuExecutor)
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
    asked: str, plain: LLM, ahead: LLM, graphs: list[ReplayByRunning], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rows with logits transforms nothing is guessed, of all others it is; and their steps are replayed."""
    launched: list[tuple[int, bool]] = []
    launch = Worker.launch

    def noting(self: Worker, plan: Plan, *others: Any) -> Any:
        handle = launch(self, plan, *others)
        launched.append((plan.step, self._ahead is not None and bool(plan.drafts)))
        return handle

    def drafts() -> float:
        return next(each.value for each in ahead.get_metrics() if each.name.endswith("decode_num_drafts"))  # type: ignore

    monkeypatch.setattr(Worker, "launch", noting)
    before = drafts()
    for replay in graphs:
        replay.replayed.clear()
    expected, found = answers(plain, ASKED[asked]), answers(ahead, ASKED[asked])
    assert found == expected
    transformed = asked in ("penalties", "bias, min_tokens", "choice")
    assert (drafts() > before) is not transformed
    assert any(drafting for _, drafting in launched)
    if not transformed:
        assert any(not shape.is_decode for shape in graphs[0].replayed)
    metrics = {each.name: each.value for each in ahead.get_metrics() if isinstance(each, Counter)}
    assert metrics["vllm:num_preemptions"] > 0


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
