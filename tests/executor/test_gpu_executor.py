"""GpuExecutor: the same as CpuExecutor, but without a thread. A CPU worker takes the place of a GPU's."""

from __future__ import annotations

import ctypes
import gc
import hashlib
import sys
import threading
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire.compute.mesh import Mesh
from quire.errors import CheckpointError
from quire.foundation.clock import SystemClock
from quire.foundation.config import Config
from quire.foundation.messages.workers import Plan, Result
from quire.runtime.executor import gpu_executor
from quire.runtime.executor.cpu_executor import CpuExecutor
from quire.runtime.executor.executor import Executor
from quire.runtime.executor.factory import build_executor
from quire.runtime.executor.gpu_executor import GpuExecutor
from quire.runtime.worker import kv_transfer
from quire.runtime.worker.pinned_host_pool import PinnedHostPool
from quire.runtime.worker.worker import Worker
from tests.checkpoints import make_llama
from tests.engine.harness import Engine, add
from tests.executor.test_cpu_executor import fail_at, first, next_
from tests.worker.driver import config_for
from tests.worker.fake_streams import use_gpu_transfer
from tests.worker.test_pinned_host_pool import LONG, Pinner

_PR_GET_TIMERSLACK = 30


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("tiny"), tokenizer=False)


@pytest.fixture
def started(tiny: Path) -> Iterator[GpuExecutor]:
    executor = GpuExecutor(config_for(tiny), SystemClock())
    executor.start()
    yield executor
    executor.close()


def test_the_device_decides_on_the_executor(tiny: Path) -> None:
    assert isinstance(build_executor(config_for(tiny, device="cuda"), SystemClock()), GpuExecutor)
    assert isinstance(build_executor(config_for(tiny, device="cpu"), SystemClock()), CpuExecutor)


def test_results_equal_the_local_executors(tiny: Path, started: GpuExecutor) -> None:
    local: Executor = CpuExecutor(config_for(tiny), SystemClock())
    local.start()
    plans = [first(), *map(next_, range(2, 12))]
    assert run(started, plans) == run(local, plans)
    local.close()


def run(executor: Executor, plans: list[Plan]) -> list[tuple[int, list[int]]]:
    """Step and tokens of each plan's result, with two in flight."""
    results = []
    for number, plan in enumerate(plans):
        executor.submit(plan)
        if number:
            results.append(executor.collect(10))
    results.append(executor.collect(10))
    return [(result.step, result.tokens) for result in results if result is not None]


def test_no_step_waits_for_host_memory_that_is_not_pinned_yet(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Preempted requests are computed again until it is; then they are swapped."""
    pinner, plans = Pinner(), list[Plan]()
    pinner.gate.clear()
    use_gpu_transfer(monkeypatch, pinner.pin, pinner.unpin)
    launch = Worker.launch
    monkeypatch.setattr(Worker, "launch", lambda worker, plan: plans.append(plan) or launch(worker, plan))
    limits = {"num_gpu_blocks_override": 12, "preemption_mode": "swap", "enable_prefix_caching": False}
    executor = GpuExecutor(config_for(tiny, swap_space=0.001, **limits), SystemClock())
    engine = Engine(executor, drafts=None, **limits)
    outputs = []
    for ready in (False, True):
        if ready:
            pinner.gate.set()
            while not engine.client.counts()["host_blocks"]:
                engine.run([add(100 + len(plans), [1], 1)])
        plans.clear()
        preemptions = engine.client.counts()["preemptions"]
        ids = [10 * ready + number for number in range(4)]
        engine.run([add(number, [7 + number % 10] * 20, 60, ignore_eos=True) for number in ids])
        outputs.append([engine.outcome.tokens[number] for number in ids])
        assert engine.client.counts()["preemptions"] > preemptions
        assert any(plan.swap_out for plan in plans) is ready
        engine.assert_all_free()
        assert ready or pinner.open == 0, "a step has waited"
    assert outputs[0] == outputs[1]
    engine.client.close()
    assert pinner.open == 0


def test_a_close_while_memory_is_pinned_does_not_hang(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pause between two parts is long: it is cut short, and nothing is pinned afterwards."""
    pinner = Pinner(most=10**6)
    use_gpu_transfer(monkeypatch, pinner.pin, pinner.unpin)
    monkeypatch.setattr(kv_transfer, "PinnedHostPool", partial(PinnedHostPool, part_bytes=1, pause_s=10 * LONG))
    executor = GpuExecutor(config_for(tiny, swap_space=0.1), SystemClock())
    assert executor.start().num_host_blocks > 1_000
    executor.close()
    assert len(pinner.threads) <= 1, "the rest is not pinned"
    assert pinner.open == 0


def test_nothing_submitted_nothing_collected(started: GpuExecutor) -> None:
    assert started.collect(0.0) is None


def test_collect_returns_none_at_its_timeout_and_the_result_later(started: GpuExecutor) -> None:
    looks = iter([False] * 3 + [True] * 2)
    flight = SimpleNamespace(done=lambda: next(looks), wait=lambda: None, result=lambda: Result(1, [1], [7]))
    started._worker = worker_of(lambda plan: flight)  # type: ignore[assignment]
    started.submit(first())
    assert started.collect(-1.0) is None
    result = started.collect(10)
    assert result is not None
    assert result.tokens == [7]


def worker_of(launch: Any) -> SimpleNamespace:
    return SimpleNamespace(launch=launch, finish=lambda handle: handle.result(), close=lambda: None)


@pytest.mark.skipif(sys.platform != "linux", reason="timers have slack on Linux")
def test_the_thread_that_starts_it_has_no_timer_slack(tiny: Path) -> None:
    def start() -> None:
        executor = GpuExecutor(config_for(tiny), SystemClock())
        executor.start()
        seen.append(ctypes.CDLL(None).prctl(_PR_GET_TIMERSLACK))
        executor.close()

    seen: list[int] = []
    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert seen == [1]


def test_what_loading_raises_is_raised_by_start(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        GpuExecutor(config_for(tmp_path), SystemClock()).start()


def test_a_failed_step_fails_all_later_ones(tiny: Path) -> None:
    executor = GpuExecutor(config_for(tiny), SystemClock(), fail_at("execute", 2))
    executor.start()
    executor.submit(first())
    executor.submit(next_(2))
    result = executor.collect(10)
    assert result is not None
    assert result.step == 1
    for step in (3, 4):
        with pytest.raises(RuntimeError, match="execute 2"):
            executor.collect(10)
        executor.submit(next_(step))
    executor.close()


@pytest.mark.parametrize("fails_when", ["looked at", "read"])
def test_a_step_that_fails_on_the_device_fails_all_later_ones(started: GpuExecutor, fails_when: str) -> None:
    def lost(step: int) -> object:
        raise RuntimeError(f"the device is lost in step {step}")

    def flight(plan: Plan) -> object:
        looked = (lambda: lost(plan.step)) if fails_when == "looked at" else (lambda: True)
        return SimpleNamespace(done=looked, wait=lambda: lost(plan.step), result=lambda: lost(plan.step))

    started._worker = worker_of(flight)  # type: ignore[assignment]
    started.submit(first())
    started.submit(next_(2))
    for _ in range(3):
        with pytest.raises(RuntimeError, match="lost in step 1"):
            started.collect(10)
    started.close()  # says nothing new, so that what the step raised is what is heard
    started.submit(next_(3))
    with pytest.raises(RuntimeError, match="lost in step 1"):
        started.collect(10)


def test_collect_works_again_after_an_interrupted_wait(started: GpuExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([False, True])
    flight = SimpleNamespace(done=lambda: next(looks), wait=lambda: None, result=lambda: Result(1, [1], [7]))
    started._worker = worker_of(lambda plan: flight)  # type: ignore[assignment]
    started.submit(first())
    with monkeypatch.context() as patch:
        patch.setattr("quire.runtime.executor.gpu_executor.time.sleep", interrupt)
        with pytest.raises(KeyboardInterrupt):
            started.collect(10)
    result = started.collect(10)
    assert result is not None
    assert result.tokens == [7]


def interrupt(seconds: float) -> None:
    raise KeyboardInterrupt


def test_closing_frees_what_the_worker_holds(tiny: Path) -> None:
    executor = GpuExecutor(config_for(tiny), SystemClock())
    executor.start()
    executor.submit(first())
    assert executor.collect(10) is not None
    held = [weakref.ref(executor._worker), weakref.ref(executor._worker._runner.slots.length)]  # type: ignore[union-attr]
    executor.close()
    assert [each() for each in held] == [None, None]
    executor.close()  # again, as by `with` and by hand


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_collection_is_as_before_after_the_start(
    enabled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(Worker, "__init__", lambda *_: seen.append(gc.isenabled()))
    monkeypatch.setattr(Worker, "load", _fail)
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(CheckpointError):
            GpuExecutor(config_for(tmp_path), SystemClock()).start()
        assert gc.isenabled() is enabled
    finally:
        gc.enable()
    assert seen == [False]


def test_no_compiler_process_is_left_where_triton_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    closed: list[int] = []
    monkeypatch.setattr(gpu_executor, "open_context", lambda: None)
    monkeypatch.setattr(gpu_executor, "marker_path", lambda cache, settings: tmp_path / "trace")
    monkeypatch.setattr(
        gpu_executor, "start_compiler_processes", lambda cores: SimpleNamespace(close=lambda: closed.append(1))
    )
    monkeypatch.setitem(sys.modules, "quire.compute.kernels.triton.launching.precompiler", None)
    with pytest.raises(ImportError):
        gpu_executor._start_precompiler(Config(), Mesh())
    assert closed == [1]


def test_kernels_are_not_compiled_ahead_where_triton_lacks_what_that_needs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from quire.compute.kernels.triton.launching import triton_private

    closed: list[int] = []
    monkeypatch.setattr(gpu_executor, "open_context", lambda: None)
    monkeypatch.setattr(gpu_executor, "marker_path", lambda cache, settings: tmp_path / "marker")
    monkeypatch.setattr(
        gpu_executor, "start_compiler_processes", lambda cores: SimpleNamespace(close=lambda: closed.append(1))
    )
    monkeypatch.setattr(triton_private, "can_compile_ahead", lambda: False)
    assert gpu_executor._start_precompiler(Config(), Mesh()) is None
    assert closed == [1]


def test_objects_of_the_start_are_in_the_oldest_generation_when_requests_come(tiny: Path) -> None:
    """Else it is looked at again by the next two collections, while somebody waits."""
    executor = GpuExecutor(config_for(tiny), SystemClock())
    gc.collect()
    executor.start()
    made = executor._worker
    young = [each for generation in (0, 1) for each in gc.get_objects(generation)]
    assert not any(each is made for each in young)
    executor.close()


def _fail(worker: Worker) -> None:
    raise CheckpointError("broken")


def test_compiler_processes_start_unless_an_equal_start_has_left_all_kernels_on_disk(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from quire.compute.kernels.triton.launching import precompiler

    made: list[dict[str, Any]] = []
    monkeypatch.setattr(precompiler, "Precompiler", lambda cores, **given: made.append(given | {"cores": cores}))
    monkeypatch.setattr(gpu_executor, "cpu_quota", lambda: 1)
    monkeypatch.setattr(gpu_executor, "open_context", lambda: None)
    monkeypatch.setattr(gpu_executor, "start_compiler_processes", lambda cores: "processes")
    monkeypatch.setattr(
        gpu_executor, "marker_path", lambda cache, settings: tmp_path / hashlib.sha256(settings).hexdigest()
    )
    one, other = Config(), Config().with_values(max_num_seqs=7)
    gpu_executor._start_precompiler(one, Mesh())
    made[0]["done"]()
    gpu_executor._start_precompiler(one, Mesh())
    gpu_executor._start_precompiler(other, Mesh())
    assert [given["processes"] for given in made] == ["processes", None, "processes"]
    assert {given["cores"] for given in made} == {1}, "as many as a container may use"
    renamed = Config().with_values(served_model_name=("another",), hf_token="secret")
    key = gpu_executor._kernel_settings_key
    assert key(renamed, Mesh()) == key(one, Mesh())
    adapted = Config().with_values(enable_lora=True)
    assert key(adapted, Mesh()) != key(one, Mesh())
    assert key(one, Mesh(0, pp=2)) != key(one, Mesh(1, pp=2))
    assert key(one, Mesh(0, tp=2)) == key(one, Mesh(1, tp=2))


def test_compiler_processes_end_if_the_start_is_interrupted_early(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[int] = []
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    monkeypatch.setattr(gpu_executor, "_start_precompiler", lambda *of: SimpleNamespace(close=lambda: closed.append(1)))
    monkeypatch.setitem(sys.modules, "quire.runtime.worker.worker", None)  # its import raises
    with pytest.raises(ImportError):
        GpuExecutor(Config().with_values(device="cuda"), SystemClock()).start()
    assert closed == [1]
