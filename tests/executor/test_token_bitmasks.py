"""Masked rows on a real worker: what they sample, who waits for whom, and how it ends when masks do not come."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from torch import Tensor

from quire.compute.kernels.cpu.library import library
from quire.errors import EngineDeadError
from quire.foundation.clock import SystemClock
from quire.foundation.messages.to_engine import Abort
from quire.foundation.messages.workers import Plan, TokenBitmasks
from quire.runtime.executor.cpu_executor import CpuExecutor
from quire.runtime.executor.executor import Executor
from quire.runtime.executor.gpu_executor import GpuExecutor
from quire.runtime.worker import buffer_ring, model_runner, worker_parts
from quire.runtime.worker.replay import RecordedSteps
from quire.runtime.worker.step import Step
from quire.runtime.worker.worker import Worker
from tests.checkpoints import VOCAB_SIZE, make_llama
from tests.engine.harness import Engine, HashMasker, add
from tests.executor.masked_requests import MASKED, TOKENS, WAIT, assert_follows, serve
from tests.executor.test_cpu_executor import first, next_
from tests.reference import Reference
from tests.worker.driver import config_for
from tests.worker.replay_by_running import CountedBufferRing, ReplayByRunning
from tests.worker.test_replay import attention

BYTES = VOCAB_SIZE // 8


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("tiny"), tokenizer=False, std=0.12)


@pytest.fixture(scope="module")
def reference(tiny: Path) -> Reference:
    return Reference(tiny)


# --- what is sampled ------------------------------------------------------------------------------------------------


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that replays steps as on a GPU, with torch's versions of its kernels."""
    monkeypatch.setattr(model_runner, "CudaGraphs", ReplayByRunning)
    monkeypatch.setattr(model_runner, "BufferRing", CountedBufferRing)
    monkeypatch.setattr(buffer_ring, "_has_memory", lambda device: True)
    monkeypatch.setattr(worker_parts, "attention_backend", attention)


SETTINGS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "small chunks": {"max_num_batched_tokens": 24},
    "preempted, recomputed": {"num_gpu_blocks_override": 12, "preemption_mode": "recompute"},
    "preempted, swapped": {"num_gpu_blocks_override": 12, "preemption_mode": "swap"},
    "processed log probabilities": {"logprobs_mode": "processed_logprobs"},
}


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_cpu_samples_what_the_masks_leave(tiny: Path, reference: Reference, settings: str) -> None:
    executor = CpuExecutor(config_for(tiny, swap_space=0.001, **SETTINGS[settings]), SystemClock())
    serve(reference, executor, SETTINGS[settings]).client.close()


def test_a_cpu_samples_masked_and_other_rows_at_once_at_the_end_of_the_recorded_step(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it does kernel by kernel; not where other transforms or log probabilities need the logits as well."""
    if library() is None:
        pytest.skip("there are no kernels on this machine")
    waited: list[object] = []
    replay = RecordedSteps.replay

    def noting(self: RecordedSteps, step: Step) -> Tensor:
        if step.stops_at_logits:
            waited.append(step)
        return replay(self, step)

    monkeypatch.setattr(RecordedSteps, "replay", noting)

    def tokens(*, enforce_eager: bool, **asked: Any) -> dict[int, list[int]]:
        waited.clear()
        executor = CpuExecutor(config_for(tiny, enforce_eager=enforce_eager), SystemClock())
        engine = Engine(executor, masker=HashMasker(vocab_size=VOCAB_SIZE), drafts=None, wait=WAIT)
        plain = {"temperature": 1.0, "top_k": 9}
        outcome = engine.run([
            add(1, [5, 6, 7], 12, extra_args=MASKED),
            add(2, [8, 9], 12, **plain),
            add(3, [8, 9, 10], 12, extra_args=MASKED, **plain),
            *([add(4, [11], 12, extra_args=MASKED, **asked)] if asked else []),
        ])  # fmt: skip
        engine.client.close()
        return {number: outcome.tokens[number] for number in (1, 2, 3)}

    expected = tokens(enforce_eager=True)
    assert not waited
    assert tokens(enforce_eager=False) == expected
    assert len(waited) >= 12
    for asked in ({"logprobs": 1}, {"presence_penalty": 1.0}):
        assert tokens(enforce_eager=False, **asked) == expected
        assert len(waited) < 12


@pytest.mark.usefixtures("replays")
@pytest.mark.parametrize("settings", ["roomy", "preempted, recomputed", "processed log probabilities"])
def test_masked_rows_are_sampled_behind_a_recorded_step(tiny: Path, reference: Reference, settings: str) -> None:
    config = config_for(tiny, max_cudagraph_capture_size=128, **SETTINGS[settings])
    executor = GpuExecutor(config, SystemClock())
    engine = serve(reference, executor, SETTINGS[settings])
    assert executor._worker is not None
    assert len(executor._worker._runner._replayable.replayed) > TOKENS  # type: ignore[attr-defined]
    engine.client.close()


def test_log_probabilities_are_the_models_own_or_those_of_what_the_mask_leaves(tiny: Path) -> None:
    found = {}
    for mode in ("raw_logprobs", "processed_logprobs"):
        executor = CpuExecutor(config_for(tiny, logprobs_mode=mode), SystemClock())
        engine = Engine(executor, masker=HashMasker(vocab_size=VOCAB_SIZE), drafts=None, wait=WAIT)
        outcome = engine.run([add(1, [5, 6, 7], 8, logprobs=VOCAB_SIZE, extra_args=MASKED)])
        found[mode] = outcome.tokens[1], outcome.logprobs[1]
        engine.client.close()
    assert found["raw_logprobs"][0] == found["processed_logprobs"][0]
    for raw, processed in zip(found["raw_logprobs"][1], found["processed_logprobs"][1], strict=True):
        assert raw is not None
        assert processed is not None
        assert min(raw.top_logprobs) > -100
        assert sum(each == -float("inf") for each in processed.top_logprobs) > VOCAB_SIZE // 4
        assert processed.rank == 1
        assert processed.logprob > raw.logprob


def test_processors_see_what_the_mask_leaves(tiny: Path) -> None:
    """CountUp's one token is allowed or it is not; then the request fails, and no other."""
    processors = {"logits_processors": ("tests.sampling.processors:CountUp",)}

    class Odd(HashMasker):
        def bits_of(self, request: Any) -> Any:
            return b"\xaa" * BYTES

    engine = Engine(
        CpuExecutor(config_for(tiny, **processors), SystemClock()), masker=Odd(), drafts=None, wait=WAIT, **processors
    )
    outcome = engine.run([
        add(1, [5], 6, extra_args=MASKED | {"count_up": 2}),
        add(2, [6], 6, extra_args=MASKED | {"count_up": 2}),
        add(3, [6], 6, extra_args=MASKED),
    ])  # fmt: skip
    assert outcome.tokens[1] == [7, 9, 11, 13, 15, 17]
    assert outcome.ends[2].reason == "refused"
    assert "No token is left" in outcome.ends[2].message
    assert len(outcome.tokens[3]) == 6
    assert all(token % 2 for token in outcome.tokens[3])
    engine.client.close()


@pytest.mark.parametrize("kind", [CpuExecutor, GpuExecutor])
def test_a_mask_that_leaves_nothing_fails_its_request_alone(tiny: Path, kind: Callable[..., Any]) -> None:
    class Closes(HashMasker):
        def bits_of(self, request: Any) -> Any:
            return bytes(BYTES) if request.id == 1 and len(request.tokens) > 5 else b"\xff" * BYTES

    engine = Engine(kind(config_for(tiny), SystemClock()), masker=Closes(), drafts=None, wait=WAIT)
    for number, more in enumerate(({}, {"presence_penalty": 1.0})):
        outcome = engine.run([
            add(1, [5, 6], 9, extra_args=MASKED, **more),
            add(10 + number, [7], 9, extra_args=MASKED),
        ])  # fmt: skip
        assert outcome.ends[1].reason == "refused"
        assert "No token is left" in outcome.ends[1].message
        assert len(outcome.tokens.pop(1)) == 4
        assert len(outcome.tokens[10 + number]) == 9
        del outcome.ends[1]
    engine.client.close()


# --- who waits for whom ---------------------------------------------------------------------------------------------


@pytest.fixture(params=[CpuExecutor, GpuExecutor])
def started(request: pytest.FixtureRequest, tiny: Path) -> Iterator[Executor]:
    executor = request.param(config_for(tiny), SystemClock())
    executor.start()
    yield executor
    executor.close()


def masked(plan: Plan) -> Plan:
    return msgspec.structs.replace(plan, masked=[0])


def only(token: int, step: int) -> TokenBitmasks:
    """Allows one token."""
    return TokenBitmasks(step, [0], [(1 << token).to_bytes(BYTES, "little")])


def collected(executor: Executor) -> list[int]:
    result = executor.collect(10)
    assert result is not None
    return result.tokens


def test_there_is_no_result_before_the_masks(started: Executor) -> None:
    started.submit(masked(first()))
    started.submit(masked(next_(2)))
    assert started.collect(0.05) is None
    for step in range(1, 8):
        started.submit_bitmasks(only(30 + step, step))
        assert collected(started) == [30 + step]
        assert started.collect(0.0) is None
        started.submit(masked(next_(step + 2)))
    started.submit_bitmasks(only(9, 8))
    assert collected(started) == [9]


def test_the_next_step_begins_with_the_masked_token(tiny: Path, started: Executor, reference: Reference) -> None:
    """Planned before the mask came, and not masked itself."""
    started.submit(masked(first()))
    started.submit(next_(2))
    started.submit_bitmasks(only(77, 1))
    assert collected(started) == [77]
    row = reference.logits([5, 6, 7, 77])[-1]
    assert collected(started) == [row.index(max(row))]


def test_closing_does_not_wait_for_masks(started: Executor) -> None:
    started.submit(masked(first()))
    started.submit(masked(next_(2)))
    closing = threading.Thread(target=started.close)
    closing.start()
    closing.join(20)
    assert not closing.is_alive()
    if isinstance(started, CpuExecutor):
        for _ in range(2):
            with pytest.raises(EngineDeadError, match="before a step's bitmasks came"):
                started.collect(1)


def test_masks_that_cannot_be_applied_fail_the_step_and_all_later_ones(started: Executor) -> None:
    started.submit(masked(first()))
    started.submit(next_(2))
    started.submit_bitmasks(TokenBitmasks(1, [0], [bytes(3)]))
    for _ in range(2):
        with pytest.raises(ValueError, match="shape"):
            started.collect(10)
    started.submit(masked(next_(3)))
    started.submit_bitmasks(only(5, 3))
    with pytest.raises(ValueError, match="shape"):
        started.collect(10)


@pytest.mark.parametrize("kind", [CpuExecutor, GpuExecutor])
def test_aborts_leave_nobody_waiting(tiny: Path, reference: Reference, kind: Callable[..., Any]) -> None:
    """At every number of turns, so that masks are due, sent, or not asked for yet."""
    engine = Engine(
        kind(config_for(tiny), SystemClock()), masker=HashMasker(vocab_size=VOCAB_SIZE), drafts=None, wait=WAIT
    )
    for turns in range(6):
        requests = [add(10 * turns + n, [5 + n, 9], 12, extra_args=MASKED) for n in range(3)]
        for request in requests:
            engine.client.send(request)
        for _ in range(turns):
            engine.step()
        engine.client.send(Abort([requests[0].id, requests[1].id]))
        while requests[2].id not in engine.outcome.ends:
            engine.step()
        assert_follows(reference, requests[2], engine.outcome.tokens[requests[2].id])
        engine.finish_steps()
        engine.assert_all_free()
    engine.client.close()


def test_a_gpus_next_step_is_launched_when_the_masks_are_there(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executor, launched = GpuExecutor(config_for(tiny), SystemClock()), list[int]()
    launch = Worker.launch
    monkeypatch.setattr(Worker, "launch", lambda worker, plan: launched.append(plan.step) or launch(worker, plan))
    executor.start()
    executor.submit(first())
    executor.submit(masked(next_(2)))
    assert launched == [1, 2], "a step without masks holds nothing up"
    assert executor.collect(10) is not None
    executor.submit(next_(3))
    assert launched == [1, 2]
    executor.submit_bitmasks(only(8, 2))
    assert launched == [1, 2, 3]
    executor.close()
