"""A rank with a GPU of its own: launches the engine's plans ahead, as an engine of one GPU does, and says when each is
done. The GPUs of ranks wait for one another, so this process does not.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from quire.compute.collectives.layout import LINE
from quire.compute.mesh import Mesh
from quire.foundation.clock import SystemClock
from quire.foundation.config import Config
from quire.foundation.messages.workers import Order, Plan, Profile, Profiled, Result, TokenBitmasks
from quire.foundation.processes.shared_memory import SharedMemory
from quire.runtime.executor.gpu_executor import POLL_S, GpuExecutor, GpuRanks
from quire.runtime.executor.rank_messages import Bitmasks, StepDone, Stop, ToRanks, fingerprint

if TYPE_CHECKING:
    from quire.runtime.executor.rank_process import EngineChannel
    from quire.runtime.worker.kernel_profile import KernelProfile


class GpuRank:
    """Runs plans until Stop. `memory` has a line for each rank, which writes its present step there, so that the engine
    sees who is late."""

    def __init__(self, config: Config, mesh: Mesh, channel: EngineChannel, memory: SharedMemory) -> None:
        self._mesh = mesh
        self._channel = channel
        self._words = memoryview(memory.view).cast("I")
        self._executor = GpuExecutor(config, SystemClock(), ranks=GpuRanks(mesh, channel.exchange, channel.agree))
        self._in_flight = 0
        self._plans: deque[Plan] = deque()  # not submitted yet
        self._bitmasks: dict[int, Bitmasks] = {}  # by step, not submitted yet
        self._masked_step: int | None = None  # submitted, and waits for its bitmasks
        self._profile: KernelProfile | None = None

    def run(self) -> None:
        """Load a part of the model, then run plans. A failed step is the end: the others wait for this rank's part."""
        limits = self._executor.start()
        self._executor.orders.report_to(self._channel.send)
        self._executor.orders.serve(Profile, self._profile_kernels)
        self._channel.send(limits)
        while not isinstance(message := self._next_message(), Stop):
            if message is None:
                self._say_oldest_or_nap()
            else:
                self._take(message)
            self._submit_plans()
        while self._plans and self._masked_step is None:  # others wait for this rank's part
            self._say_oldest_or_nap()
            self._submit_plans()
        self._executor.close()

    def _next_message(self) -> ToRanks | None:
        """The engine's next message; None if there is none while steps are in flight."""
        return self._channel.poll() if self._in_flight else self._channel.receive()

    def _take(self, message: ToRanks) -> None:
        if isinstance(message, Bitmasks):
            self._bitmasks[message.step] = message
            return
        if isinstance(message, Order):
            self._executor.orders.post(message)
            return
        assert isinstance(message, Plan), message
        self._plans.append(message)

    def _profile_kernels(self, order: Profile) -> None:
        from quire.runtime.worker.kernel_profile import KernelProfile  # torch's profiler takes time to import

        kernels = []
        if order.begins:
            self._profile = KernelProfile()
        else:
            assert self._profile is not None, "no profile was begun"
            kernels.append(self._profile.end())
            self._profile = None
        self._executor.orders.report(Profiled(kernels))

    def _submit_plans(self) -> None:
        """Submit as many plans as may be in flight, but in all stages no plan behind a masked step before its bitmasks
        are there: no device waits for what is still to come from the engine.

        The rank that answers may be quicker; then everything that a plan left here waits for has come.
        """
        while True:
            if self._masked_step in self._bitmasks:
                self._submit_bitmasks(self._bitmasks.pop(self._masked_step))
            elif self._plans and self._masked_step is None and self._in_flight < self._executor.max_in_flight:
                self._submit(self._plans.popleft())
            else:
                return

    def _submit(self, plan: Plan) -> None:
        self._words[self._mesh.tp_rank * LINE // 4] = plan.step & 0xFFFFFFFF
        self._executor.submit(plan if self._mesh.is_last else for_earlier_stage(plan))
        self._in_flight += 1
        if plan.masked:
            self._masked_step = plan.step

    def _submit_bitmasks(self, masks: Bitmasks) -> None:
        self._masked_step = None
        if self._mesh.is_last:
            self._executor.submit_bitmasks(TokenBitmasks(masks.step, masks.rows, list(masks.bits)))

    def _say_oldest_or_nap(self) -> None:
        """Tell the engine of the oldest step, if it is done."""
        if (result := self._executor.collect(0.0)) is None:
            time.sleep(POLL_S)
            return
        assert isinstance(result, Result), "ranks make no drafts"
        self._in_flight -= 1
        self._channel.send(self._said(result))

    def _said(self, result: Result) -> Result | StepDone:
        """What the rank tells the engine: one rank of the last stage sends the result, the others a fingerprint."""
        if not self._mesh.is_last:
            return StepDone(result.step, 0, result.ready_host_blocks)
        if self._mesh.tp_rank == 0:
            return result
        return StepDone(result.step, fingerprint(result), result.ready_host_blocks)


def for_earlier_stage(plan: Plan) -> Plan:
    """The plan as an earlier stage runs it on a GPU: nothing is reported, and no step waits for bitmasks. Which rows
    are sampled stays in the plan, since all stages pad a step by that."""
    return msgspec.structs.replace(plan, masked=[], prompt_logprobs_rows=[])
