"""The executor in this process: order, overlap, faults and the end."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.errors import CheckpointError
from quire.foundation.clock import SystemClock
from quire.foundation.config import environment
from quire.foundation.messages.workers import Plan
from quire.runtime.executor.cpu_executor import CpuExecutor
from quire.runtime.executor.executor import Executor, FaultHook, no_faults
from quire.runtime.worker.worker import Worker
from tests.checkpoints import make_llama
from tests.worker.driver import admitted, config_for


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("tiny"), tokenizer=False)


@pytest.fixture
def started(tiny: Path) -> Iterator[CpuExecutor]:
    executor = CpuExecutor(config_for(tiny), SystemClock())
    executor.start()
    yield executor
    executor.close()


def test_its_worker_is_closed_with_it(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[Worker] = []
    monkeypatch.setattr(Worker, "close", lambda worker: closed.append(worker))
    executor = CpuExecutor(config_for(tiny), SystemClock())
    executor.start()
    assert not closed
    executor.close()
    assert len(closed) == 1


def first(step: int = 1) -> Plan:
    return Plan(
        step=step,
        admitted=[admitted(0, seed=1, num_sampled=0, temperature=0.0)],
        block_slots=[0],
        block_groups=[0],
        block_indices=[0],
        block_ids=[1],
        slots=[0],
        counts=[3],
        token_rows=[0],
        tokens=[5, 6, 7],
        sampled_rows=[0],
    )


def next_(step: int) -> Plan:
    return Plan(step=step, slots=[0], counts=[1], sampled_rows=[0])


def test_it_is_an_executor(tiny: Path) -> None:
    executor: Executor = CpuExecutor(config_for(tiny), SystemClock())
    assert executor.max_in_flight == 2
    executor.close()  # before start: nothing to wait for


def test_results_come_in_order_and_plans_may_run_ahead(started: CpuExecutor) -> None:
    assert started.collect(0.0) is None
    started.submit(first())
    started.submit(next_(2))
    ahead = []
    for step in range(3, 10):
        ahead.append(started.collect(10))
        started.submit(next_(step))
    ahead += [started.collect(10), started.collect(10)]
    assert [r.step for r in ahead if r] == list(range(1, 10))
    started.submit(first(10))
    alone = [started.collect(10)]
    for step in range(11, 19):
        started.submit(next_(step))
        alone.append(started.collect(10))
    assert [r.tokens for r in ahead if r] == [r.tokens for r in alone if r]
    assert all(r.device_ms > 0 for r in ahead if r)


def test_startup_is_reported_by_stage(tiny: Path) -> None:
    executor = CpuExecutor(config_for(tiny), SystemClock())
    device_limits = executor.start()
    executor.close()
    assert set(device_limits.startup) == {"import", "kernels", "weights", "kv_cache", "graphs"}
    assert all(seconds >= 0 for seconds in device_limits.startup.values())


def test_what_loading_raises_is_raised_by_start(tmp_path: Path) -> None:
    executor = CpuExecutor(config_for(tmp_path), SystemClock())
    with pytest.raises(CheckpointError, match=r"config\.json"):
        executor.start()
    executor.close()


def fail_at(point: str, step: int) -> FaultHook:
    def hook(here: str, now: int) -> None:
        if (here, now) == (point, step):
            raise RuntimeError(f"{point} {step}")

    return hook


def test_faults_in_the_calling_thread(tiny: Path) -> None:
    executor = CpuExecutor(config_for(tiny), SystemClock(), fail_at("submit", 1))
    executor.start()
    with pytest.raises(RuntimeError, match="submit 1"):
        executor.submit(first())
    executor.close()
    executor = CpuExecutor(config_for(tiny), SystemClock(), fail_at("collect", 1))
    executor.start()
    executor.submit(first())
    with pytest.raises(RuntimeError, match="collect 1"):
        executor.collect(10)
    executor.close()


def test_a_failed_step_fails_all_later_ones(tiny: Path) -> None:
    executor = CpuExecutor(config_for(tiny), SystemClock(), fail_at("execute", 2))
    executor.start()
    for plan in (first(), next_(2), next_(3)):
        executor.submit(plan)
    result = executor.collect(10)
    assert result is not None
    assert result.step == 1
    for _ in range(2):
        with pytest.raises(RuntimeError, match="execute 2"):
            executor.collect(10)
    executor.close()


def test_close_waits_for_what_is_running(tiny: Path) -> None:
    running, go = threading.Event(), threading.Event()

    def hold(point: str, step: int) -> None:
        if point == "execute":
            running.set()
            go.wait(10)
        no_faults(point, step)

    executor = CpuExecutor(config_for(tiny), SystemClock(), hold)
    executor.start()
    executor.submit(first())
    assert running.wait(10)
    assert executor.collect(0.05) is None
    threading.Timer(0.1, go.set).start()
    executor.close()
    assert executor.collect(0) is not None


@pytest.mark.parametrize("chosen", [{}, {"OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": "9"}])
def test_openmp_spinning_is_limited_unless_the_user_chose(
    chosen: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    for name in names:
        monkeypatch.setenv(name, "to be restored")
        monkeypatch.delenv(name)
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    environment.limit_openmp_spinning()
    assert {n: os.environ[n] for n in names if n in os.environ} == (chosen or {"GOMP_SPINCOUNT": "5000"})


def test_torch_is_imported_by_start_only(tiny: Path) -> None:
    code = "import sys, quire.runtime.executor.cpu_executor; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)
