"""An executor on a GPU stream: submitting launches a step, collecting waits for its outputs.

There is no thread: the device runs ahead of the host, and the engine's thread plans while it computes. Knows nothing
about requests.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from quire.compute.kernels.triton.launching.compile_marker import is_written, marker_path, write
from quire.compute.kernels.triton.launching.compiler_processes import start_compiler_processes
from quire.compute.mesh import Mesh
from quire.foundation.clock import Clock
from quire.foundation.config import Config, environment
from quire.foundation.messages.workers import DeviceLimits, MaskedDrafts, Plan, Result, TokenBitmasks
from quire.foundation.processes.garbage import no_collection
from quire.planning.kv_cache_plan import NumBlocks
from quire.runtime.executor.early_loading import open_context
from quire.runtime.executor.executor import FaultHook, no_faults
from quire.runtime.worker.async_scheduling import MAX_STEPS_IN_FLIGHT
from quire.runtime.worker.startup.threads import cpu_quota

if TYPE_CHECKING:
    from quire.compute.kernels.triton.launching.precompiler import Precompiler
    from quire.runtime.worker.orders import WorkerOrders
    from quire.runtime.worker.step_handle import StepHandle
    from quire.runtime.worker.worker import Worker

POLL_S = 10e-6
"""Time between two checks whether a step is done; the interpreter's lock is free meanwhile."""
_PR_SET_TIMERSLACK = 29


class GpuRanks(NamedTuple):
    """The place of one of several executors that divide a model, and its ways to the others.

    `exchange` is described in compute/collectives/cards.py, and `agree` in Worker.load.
    """

    mesh: Mesh
    exchange: Callable[[bytes], Sequence[bytes]]
    agree: Callable[[NumBlocks], NumBlocks]


class GpuExecutor:
    """One worker on one GPU.

    A step that raises is the last: `collect` raises its error for it and for every later step. The step behind one that
    waits for bitmasks is launched when these are there, since its rows begin with the tokens that are sampled then. A
    step that gets drafts is launched when all results before it are taken, since drafts depend on all tokens: as the
    last result is collected, before the engine processes it.

    Args:
        ranks: Where this executor is among those that divide the model; None: it has the whole model.
    """

    max_in_flight = MAX_STEPS_IN_FLIGHT

    def __init__(
        self, config: Config, clock: Clock, fault: FaultHook = no_faults, ranks: GpuRanks | None = None
    ) -> None:
        self._config = config
        self._ranks = ranks
        self._clock = clock
        self._fault = fault
        self._handles: deque[StepHandle] = deque()
        self._plans: deque[tuple[Plan, bool]] = deque()  # not launched yet; and whether they await all results
        self._masked_drafts: deque[MaskedDrafts] = deque()  # not collected yet
        self._awaits_bitmasks = False  # the step that was launched last
        self._failure: BaseException | None = None
        self._worker: Worker | None = None

    @property
    def orders(self) -> WorkerOrders:
        assert self._worker is not None, "not started, or closed"
        return self._worker.orders

    def start(self) -> DeviceLimits:
        began = self._clock.now()
        environment.number_gpus_by_pci_bus()
        with no_collection():  # which takes a tenth of the time of imports
            mesh = None if self._ranks is None else self._ranks.mesh
            precompiler = (
                _start_precompiler(self._config, mesh or Mesh()) if self._config.device.device == "cuda" else None
            )
            try:
                import quire.runtime.worker.worker  # noqa: F401 # torch: only a process that computes pays for it

                imported = self._clock.now() - began
                self._worker = self._build_worker(precompiler)
            except BaseException:
                if precompiler is not None:
                    precompiler.close()
                raise
            device_limits = self._worker.load(*([] if self._ranks is None else [self._ranks.agree]))
        if gc.isenabled():  # all objects so far stay: collecting younger ones would take 50 ms each in first requests
            gc.collect()
        _shorten_timer_slack()
        startup = {"import": imported, **device_limits.startup}
        return msgspec.structs.replace(device_limits, startup=startup, masked_drafts=True)

    def submit(self, plan: Plan) -> None:
        self._fault("submit", plan.step)
        awaits_results = False
        if plan.drafts and self._failure is None:
            assert self._worker is not None, "not started, or closed"
            awaits_results = self._worker.awaits_results(plan)
        self._plans.append((plan, awaits_results))
        self._launch_plans()

    def submit_bitmasks(self, masks: TokenBitmasks) -> None:
        if self._failure is not None:
            return
        assert self._worker is not None and self._awaits_bitmasks, "no step waits for bitmasks"
        try:
            self._worker.submit_bitmasks(masks)
        except BaseException as error:
            self._failure = error
            self._handles.pop()  # it never ends
        self._awaits_bitmasks = False
        self._launch_plans()

    def collect(self, timeout: float | None) -> Result | MaskedDrafts | None:
        if self._masked_drafts:
            return self._masked_drafts.popleft()
        if not self._handles:
            if self._failure is not None:
                raise self._failure
            return None
        if self._awaits_bitmasks and len(self._handles) == 1:
            return None  # they come from the thread that would wait
        try:
            result = self._oldest(timeout)
        except Exception as error:  # an interrupt of the wait leaves the step where it is
            self._failure = error
            self._handles.clear()  # later steps build on it
            raise
        if result is not None:
            self._fault("collect", result.step)
            self._launch_plans()
        return result

    def check(self) -> None:
        """What has become of the device shows in the next step."""

    def close(self) -> None:
        """Wait for what is running and free the device. After a failed step, already raised, errors are suppressed."""
        try:
            with nullcontext() if self._failure is None else suppress(Exception):
                for handle in self._handles:
                    handle.wait()
        finally:
            self._handles.clear()
            self._plans.clear()
            worker, self._worker = self._worker, None
            if worker is not None:
                worker.close()
                del worker
                from quire.runtime.worker.startup.gpu_memory import release

                with nullcontext() if self._failure is None else suppress(Exception):
                    release()

    def _build_worker(self, precompiler: Precompiler | None) -> Worker:
        from quire.runtime.worker.worker import Worker

        if self._ranks is None:
            return Worker(self._config, self._clock, precompiler)
        import torch

        from quire.runtime.executor.card_ranks import reach_ranks
        from quire.runtime.worker.startup.gpu_memory import use_expandable_segments

        device, mesh = torch.device("cuda:0"), self._ranks.mesh
        use_expandable_segments(device)
        ranks = reach_ranks(self._config, mesh, device, self._ranks.exchange)
        return Worker(
            self._config,
            self._clock,
            precompiler,
            mesh,
            ranks.collectives,
            ranks.links,
            rehearsed=ranks.rehearsed,
            stages=ranks.stages,
        )

    def _launch_plans(self) -> None:
        """Launch plans until one has to wait for bitmasks or results; none after a failure."""
        while self._plans and self._failure is None and not self._awaits_bitmasks:
            assert self._worker is not None, "not started, or closed"
            plan, awaits_results = self._plans[0]
            if awaits_results and self._handles:
                return
            self._plans.popleft()
            try:
                self._fault("execute", plan.step)
                self._handles.append(self._worker.launch(plan))
                self._awaits_bitmasks = bool(plan.masked)
                if plan.drafts and plan.masked and (masked := self._worker.take_masked_drafts()) is not None:
                    self._masked_drafts.append(masked)
            except BaseException as error:
                self._failure = error

    def _oldest(self, timeout: float | None) -> Result | None:
        """Return the oldest step's result once it is done, or None after `timeout` seconds."""
        assert self._worker is not None
        handle = self._handles[0]
        deadline = None if timeout is None else time.monotonic() + timeout
        while not handle.done():
            if deadline is not None and time.monotonic() > deadline:
                return None
            time.sleep(POLL_S)
        self._handles.popleft()
        return self._worker.finish(handle)


def _shorten_timer_slack() -> None:
    """Let this thread's sleeps end on time: Linux adds up to 50 µs by default, to wake several threads together
    (prctl(2)). On other systems polling is a little coarser."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1))  # nanosecond


def _start_precompiler(config: Config, mesh: Mesh) -> Precompiler | None:
    """Start what takes long and needs no torch in threads and other processes, while torch is imported."""
    cores = max(1, round(min(len(os.sched_getaffinity(0)), cpu_quota()) / config.parallel.ranks))
    marker = marker_path(environment.kernel_cache(), _kernel_settings_key(config, mesh))
    processes = None if is_written(marker) else start_compiler_processes(cores)
    threading.Thread(target=open_context, name="context", daemon=True).start()
    with ExitStack() as started:
        if processes is not None:
            started.enter_context(closing(processes))
        # Triton is there only with a GPU's torch.
        from quire.compute.kernels.triton.launching.precompiler import Precompiler
        from quire.compute.kernels.triton.launching.triton_private import can_compile_ahead

        if not can_compile_ahead():
            return None
        started.pop_all()
    return Precompiler(cores, processes=processes, done=partial(write, marker))


def _kernel_settings_key(config: Config, mesh: Mesh) -> bytes:
    """The settings that decide which kernels a start compiles on the rank at this place."""
    model = config.model
    of_model = (model.model, model.revision, model.dtype, model.max_model_len, model.max_logprobs, model.logprobs_mode)
    lora, place = config.lora, (mesh.tp, mesh.pp, mesh.ep, mesh.stage)
    of_adapters = (lora.enable_lora, lora.max_loras, lora.max_lora_rank)
    of_device = (config.device, environment.kernel_settings(), place)
    settings = (config.cache, config.scheduler, config.speculation, *of_device)
    return msgspec.json.encode((of_model, of_adapters, *settings))
