"""An executor whose worker runs in a thread of this process.

The engine's thread goes on planning while torch computes without the interpreter's lock. Knows nothing about requests.
"""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING, TypeVar

import msgspec

from quire.errors import EngineDeadError
from quire.foundation.clock import Clock
from quire.foundation.config import Config, environment
from quire.foundation.messages.workers import DeviceLimits, MaskedDrafts, Plan, Result, TokenBitmasks
from quire.foundation.processes.garbage import no_collection
from quire.runtime.executor.executor import FaultHook, no_faults
from quire.runtime.worker.async_scheduling import MAX_STEPS_IN_FLIGHT
from quire.runtime.worker.orders import WorkerOrders

if TYPE_CHECKING:
    from quire.runtime.worker.worker import Worker

T = TypeVar("T")


class CpuExecutor:
    """One worker in one thread.

    A step that raises is the last, since its work may be half done: `collect` raises its error for it and for every
    later step. Masked rows are computed like others; the thread waits for their bitmasks before it samples. Host blocks
    lie in `host_memory`; None: in memory of this process.
    """

    max_in_flight = MAX_STEPS_IN_FLIGHT

    def __init__(
        self, config: Config, clock: Clock, fault: FaultHook = no_faults, host_memory: memoryview | None = None
    ) -> None:
        self._config = config
        self._host_memory = host_memory
        self._clock = clock
        self._fault = fault
        self._plans: queue.SimpleQueue[Plan | None] = queue.SimpleQueue()
        self._bitmasks: queue.SimpleQueue[TokenBitmasks | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[Result | MaskedDrafts | BaseException] = queue.SimpleQueue()
        self._started: queue.SimpleQueue[DeviceLimits | BaseException] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="worker", daemon=True)
        self.orders = WorkerOrders()

    def start(self) -> DeviceLimits:
        self._thread.start()
        return _or_raise(self._started.get())

    def submit(self, plan: Plan) -> None:
        self._fault("submit", plan.step)
        self._plans.put(plan)

    def submit_bitmasks(self, masks: TokenBitmasks) -> None:
        self._bitmasks.put(masks)

    def collect(self, timeout: float | None) -> Result | MaskedDrafts | None:
        try:
            result = self._results.get(timeout=timeout)
        except queue.Empty:
            return None
        if isinstance(result, MaskedDrafts):
            return result
        result = _or_raise(result)
        self._fault("collect", result.step)
        return result

    def check(self) -> None:
        """The thread waits: nothing happens to it meanwhile."""

    def close(self) -> None:
        """Wait for what is running; a step whose bitmasks are missing fails."""
        self._plans.put(None)
        self._bitmasks.put(None)
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        try:
            worker, device_limits = self._load()
        except BaseException as error:
            self._started.put(error)
            return
        self.orders = worker.orders
        self._started.put(device_limits)
        failure: BaseException | None = None
        while (plan := self._plans.get()) is not None:
            try:
                if failure is not None:
                    raise failure
                self._fault("execute", plan.step)
                self._results.put(worker.execute(plan, self._next_bitmasks, self._results.put))
            except BaseException as error:
                failure = error
                self._results.put(error)
        worker.close()

    def _load(self) -> tuple[Worker, DeviceLimits]:
        began = self._clock.now()
        environment.limit_openmp_spinning()
        with no_collection():  # which took a tenth of importing torch
            from quire.runtime.worker.worker import Worker  # torch: only a process that computes pays for it

            imported = self._clock.now() - began
            worker = Worker(self._config, self._clock)
            worker.host_memory = self._host_memory
            limits = worker.load()
        startup = {"import": imported, **limits.startup}
        return worker, msgspec.structs.replace(limits, startup=startup, masked_drafts=True)

    def _next_bitmasks(self) -> TokenBitmasks:
        """Wait for the bitmasks of the running step. They come in the order of the plans that have masked rows."""
        masks = self._bitmasks.get()
        if masks is None:
            raise EngineDeadError("The executor was closed before a step's bitmasks came.")
        return masks


def _or_raise(value: T | BaseException) -> T:
    if isinstance(value, BaseException):
        raise value
    return value
