"""The engine process with an executor that fails on demand."""

from __future__ import annotations

import os
import time
from pathlib import Path

from quire.engine.process import main as engine_main
from quire.foundation.clock import Clock
from quire.foundation.config import Config
from quire.foundation.messages.workers import DeviceLimits, Plan, Result, TokenBitmasks
from quire.foundation.processes.child_main import run_child
from quire.foundation.processes.launch import GroupEnds, LaunchConfig, SendReport
from quire.runtime.executor.executor import Executor, Orders
from quire.runtime.executor.factory import build_executor

FAULT_FILE = "QUIRE_TEST_FAULT_FILE"
POISON = 1_717
"""A prompt with this token ends the engine by SIGABRT, wherever `always poison` stands in the file."""
SLOW_STEP_S = 2.5
"""Less than any step is given before the engine counts as stuck."""
UNHURRIED_STEP_S = 0.05
"""Of each step, as long as `always unhurried` stands in the file."""


class FaultyExecutor:
    """Passes everything on, until the file says what is to go wrong."""

    def __init__(self, inner: Executor) -> None:
        self._inner = inner
        self._file = Path(os.environ[FAULT_FILE])
        self._hung = False
        self._slow_until = 0.0

    @property
    def max_in_flight(self) -> int:
        return self._inner.max_in_flight

    @property
    def orders(self) -> Orders:
        return self._inner.orders

    def start(self) -> DeviceLimits:
        return self._inner.start()

    def submit(self, plan: Plan) -> None:
        match self._fault():
            case "abort":
                os.abort()
            case "exception":
                raise RuntimeError("planted: an exception in the step")
            case "memory":
                raise MemoryError("planted: an allocation failed")
            case "allocation":
                _allocate_too_much()
            case "slow":
                self._slow_until = time.monotonic() + SLOW_STEP_S
            case "cuda":
                _break_cuda()
            case "hang":
                self._hung = True
            case "always unhurried":
                time.sleep(UNHURRIED_STEP_S)
            case "always poison" if POISON in plan.tokens:
                os.abort()
        self._inner.submit(plan)

    def submit_bitmasks(self, masks: TokenBitmasks) -> None:
        self._inner.submit_bitmasks(masks)

    def collect(self, timeout: float | None) -> Result | None:
        if self._hung:  # a step that never ends, while the engine's loop goes on
            time.sleep(timeout or 0.1)
            return None
        if time.monotonic() < self._slow_until:
            time.sleep(min(timeout or 0.1, 0.1))
            return None
        return self._inner.collect(timeout)

    def check(self) -> None:
        self._inner.check()

    def close(self) -> None:
        self._inner.close()

    def _fault(self) -> str:
        try:
            fault = self._file.read_text()
        except FileNotFoundError:
            return ""
        if not fault.startswith("always"):
            self._file.unlink()
        return fault


def _allocate_too_much() -> None:
    """Ask torch for more memory than there is, as a step would."""
    import torch  # in the engine, where it is loaded

    torch.empty(2**50, dtype=torch.uint8)


def _break_cuda() -> None:
    """Launch a kernel that reads outside its input: every later call to the device fails."""
    import torch  # only where there is a device

    torch.zeros(4, device="cuda").index_select(0, torch.tensor([99], device="cuda"))


def main(launch: LaunchConfig, report: SendReport) -> None:
    def make(config: Config, clock: Clock, group: GroupEnds | None, memory: memoryview | None) -> Executor:
        return FaultyExecutor(build_executor(config, clock, group, memory))

    engine_main(launch, report, make)


if __name__ == "__main__":
    run_child(main)
