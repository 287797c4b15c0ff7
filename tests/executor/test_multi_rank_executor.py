"""Ranks in processes of their own: the same results, and an end that names the rank that is to blame."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.errors import CheckpointError, EngineDeadError
from quire.foundation.clock import SystemClock
from quire.runtime.executor import multi_rank_executor, rank_processes
from quire.runtime.executor.cpu_executor import CpuExecutor
from quire.runtime.executor.executor import Executor
from quire.runtime.executor.factory import build_executor
from quire.runtime.executor.multi_rank_executor import MultiRankExecutor
from quire.runtime.executor.nodes.head_ranks import Ranks, start_ranks
from quire.runtime.executor.rank_processes import RankProcesses
from tests.checkpoints import make_llama
from tests.engine.test_client_liveness import ManualClock
from tests.executor.masked_requests import serve
from tests.executor.test_cpu_executor import first, next_
from tests.executor.test_gpu_executor import run
from tests.reference import Reference
from tests.worker.driver import config_for

TWO = {"tensor_parallel_size": 2}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("tiny"), tokenizer=False)


@pytest.fixture
def ranks(tiny: Path) -> Iterator[MultiRankExecutor]:
    executor = build_executor(config_for(tiny, **TWO), SystemClock())
    assert isinstance(executor, MultiRankExecutor)
    executor.start()
    yield executor
    executor.close()


def pids(executor: MultiRankExecutor) -> list[int]:
    assert executor._ranks is not None
    return [child.pid for child in executor._ranks._children]


def collect_all(executor: Executor) -> None:
    """Until it raises."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        executor.collect(1)


def check_all(executor: Executor) -> None:
    """Until it raises."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        executor.check()
        time.sleep(0.01)


def wait_done(executor: MultiRankExecutor, step: int) -> None:
    """Until all ranks have said that they are done with it: others may after the one that answers."""
    while min(executor._stages._done) < step:
        executor.check()
        time.sleep(0.01)


def gone(pid: int) -> bool:
    """Within some seconds."""
    deadline = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return not Path(f"/proc/{pid}").exists()


def test_results_are_those_of_one_rank_and_a_dead_rank_is_named(tiny: Path, ranks: MultiRankExecutor) -> None:
    one: Executor = CpuExecutor(config_for(tiny), SystemClock())
    one.start()
    plans = [first(), *map(next_, range(2, 12))]
    assert run(ranks, plans) == run(one, plans)
    one.close()
    assert ranks.collect(0.0) is None
    ranks.submit(next_(12))
    ranks.collect(30)
    _, second = processes = pids(ranks)
    ranks.check()
    os.kill(second, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match=rf"Rank 1 of 2 \(process {second}\) died"):
        check_all(ranks)
    ranks.submit(next_(13))
    for _ in range(2):
        with pytest.raises(EngineDeadError, match=rf"Rank 1 of 2 \(process {second}\) died: .*SIGKILL"):
            collect_all(ranks)
    ranks.close()
    assert all(map(gone, processes))


def test_stages_give_the_results_of_one_rank_and_a_dead_one_is_named(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one: Executor = CpuExecutor(config_for(tiny), SystemClock())
    one.start()
    ranks = MultiRankExecutor(config_for(tiny, pipeline_parallel_size=2), SystemClock())
    assert ranks.max_in_flight == 3
    ranks.start()
    plans = [first(), *map(next_, range(2, 12))]
    assert run(ranks, plans) == run(one, plans)
    one.close()
    waits: list[float | None] = []
    receive = ranks._ranks.receive  # type: ignore[union-attr]
    monkeypatch.setattr(ranks._ranks, "receive", lambda wait: waits.append(wait) or receive(wait))
    assert ranks.collect(0.0) is None
    assert waits == [0.0], "nobody waits where nothing is to be waited for"
    second = pids(ranks)[1]
    ranks.submit(next_(12))
    ranks.collect(30)
    os.kill(second, signal.SIGKILL)
    ranks.submit(next_(13))
    with pytest.raises(EngineDeadError, match=rf"Rank 1 of 2 \(process {second}\) died: .*SIGKILL"):
        collect_all(ranks)
    ranks.close()
    assert gone(second)


@pytest.mark.long("many cards")
@pytest.mark.parametrize("rank", [0, 2])
def test_a_stage_that_keeps_the_others_waiting_is_named(tiny: Path, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is stopped, but nobody may see that."""
    settings = {"pipeline_parallel_size": 3}
    executor = MultiRankExecutor(config_for(tiny, **settings), SystemClock())
    executor.start()
    late = pids(executor)[rank]
    executor.submit(first())
    assert executor.collect(30) is not None
    wait_done(executor, 1)
    monkeypatch.setattr(rank_processes, "process_state", lambda pid: "S")
    monkeypatch.setattr(executor._stages, "_patience_s", 3.0)  # not for the first step, which nobody holds up
    os.kill(late, signal.SIGSTOP)
    executor.submit(next_(2))
    wanted = rf"Rank {rank} of 3 \(process {late}\) was stuck: in step 2 the other stages waited 3 s for it"
    with pytest.raises(EngineDeadError, match=wanted):
        collect_all(executor)
    executor.close()


@pytest.mark.long("many cards")
@pytest.mark.parametrize("ranks", [TWO, {"pipeline_parallel_size": 2}])
def test_masked_requests_are_served_by_ranks(tiny: Path, ranks: dict[str, int]) -> None:
    settings = {"max_num_batched_tokens": 64}
    executor = build_executor(config_for(tiny, **ranks, **settings), SystemClock())
    serve(Reference(tiny), executor, settings).client.close()


@pytest.mark.long("many cards")
def test_a_stopped_rank_is_named_within_seconds(ranks: MultiRankExecutor) -> None:
    ranks.submit(first())
    assert ranks.collect(30) is not None
    stopped = pids(ranks)[0]
    os.kill(stopped, signal.SIGSTOP)
    began = time.monotonic()
    ranks.submit(next_(2))
    with pytest.raises(EngineDeadError, match=rf"Rank 0 of 2 \(process {stopped}\) was stopped by SIGSTOP"):
        collect_all(ranks)
    assert time.monotonic() - began < 30
    ranks.close()
    assert gone(stopped)


@pytest.mark.long("many cards")
def test_a_rank_that_keeps_the_others_waiting_is_named(
    tiny: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stopped, but nobody may see that."""
    monkeypatch.setattr(rank_processes, "PATIENCE_S", 6.0)
    executor = MultiRankExecutor(config_for(tiny, **TWO), SystemClock())
    executor.start()
    assert executor._ranks is not None
    late = pids(executor)[1]
    executor.submit(first())
    assert executor.collect(30) is not None
    wait_done(executor, 1)
    monkeypatch.setattr(rank_processes, "process_state", lambda pid: "S")
    os.kill(late, signal.SIGSTOP)
    executor.submit(next_(2))
    with pytest.raises(EngineDeadError, match=r"Rank 1 of 2 was stuck: in step 2 the others waited 6 s for it"):
        collect_all(executor)
    executor.close()
    (warning,) = [record.getMessage() for record in caplog.records if "late" in record.getMessage()]
    assert warning.startswith(f"Rank 1 of 2 (process {late}) is late")


@pytest.mark.long("many cards")
def test_a_rank_of_another_machine_that_is_late_is_named(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a second node whose ranks are 2 and 3: its lists begin at 0."""
    executor = MultiRankExecutor(config_for(tiny, **TWO), SystemClock())
    executor.start()
    ranks = executor._ranks
    assert isinstance(ranks, RankProcesses)
    clock = ManualClock()
    monkeypatch.setattr(ranks, "_clock", clock)
    monkeypatch.setattr(ranks, "_here", range(2, 4))
    monkeypatch.setattr(ranks, "_on_gpus", True)
    monkeypatch.setattr(ranks, "_last_look", 0.0)
    monkeypatch.setattr(rank_processes, "calls_of", lambda words, rank: [5, 4][rank])
    monkeypatch.setattr(rank_processes, "process_state", lambda pid: "S")

    def look_long() -> None:
        for _ in range(1000):
            clock.time += 1.0
            ranks._look()

    with pytest.raises(EngineDeadError, match=r"Rank 3 of 2 .* was stuck: in step 5 the others waited"):
        look_long()
    monkeypatch.undo()
    executor.close()


def test_a_start_is_bounded_in_time_and_says_who_is_missing(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are stopped, which nobody may see: fast ones would read their weights within the second."""
    monkeypatch.setattr(rank_processes, "process_state", lambda pid: "S")
    monkeypatch.setattr(multi_rank_executor, "start_ranks", start_stopped)
    executor = MultiRankExecutor(config_for(tiny, **TWO, distributed_timeout_seconds=1), SystemClock())
    with pytest.raises(EngineDeadError, match=r"Rank 0 of 2 .*Rank 1 of 2 .* did not read its weights within 1 s"):
        executor.start()


def start_stopped(*settings: Any) -> Ranks:
    ranks = start_ranks(*settings)
    assert isinstance(ranks, RankProcesses)
    for pid in ranks.pids:
        os.kill(pid, signal.SIGSTOP)
    return ranks


@pytest.mark.long("many cards")
def test_what_a_ranks_start_raises_is_raised(tmp_path: Path) -> None:
    directory = make_llama(tmp_path, tokenizer=False)
    (directory / "model.safetensors").write_bytes(b"broken")
    executor = MultiRankExecutor(config_for(directory, **TWO), SystemClock())
    with pytest.raises(CheckpointError, match="broken or cut short"):
        executor.start()


def test_ranks_that_sample_differently_are_the_end(tiny: Path) -> None:
    from quire.foundation.messages.workers import Result
    from quire.runtime.executor.rank_messages import StepDone

    class Two:
        def name(self, rank: int) -> str:
            return f"Rank {rank} of 2"

    executor = MultiRankExecutor(config_for(tiny, **TWO), SystemClock())
    executor._ranks = Two()  # type: ignore[assignment]
    with pytest.raises(EngineDeadError, match="Rank 1 of 2 sampled other tokens than another rank in step 7"):
        executor._take([(0, Result(7, [1], [5])), (1, StepDone(7, 0))])
