"""What the engine process does; `quire.engine.start` is its entry."""

from __future__ import annotations

import gc
import signal
from collections.abc import Callable
from pathlib import Path
from time import thread_time
from types import FrameType

from quire.clock import SystemClock
from quire.engine.build import build_model_runtime_info
from quire.engine.core import HEARTBEAT_S, EngineCore
from quire.engine.transport import ZmqPort
from quire.executor.factory import build_executor
from quire.models.spec import read_spec
from quire.processes.child_main import one_line_error
from quire.processes.launch import LaunchConfig, StatusReport
from quire.structured_output.bitmask_source import grammar_bitmasks


def main(launch: LaunchConfig, report: Callable[[StatusReport], None]) -> None:
    """Load the model, then turn the loop until SIGTERM."""
    stopping = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopping
        stopping = True

    clock = SystemClock()
    port = ZmqPort(Path(launch.directory), launch.engine)
    executor, masker = build_executor(launch.config, clock), None
    try:
        device_limits = executor.start()
        runtime_info = build_model_runtime_info(
            launch.config, read_spec(launch.config.model.model, launch.config.model.quantization)
        )
        masker = grammar_bitmasks(launch.config, device_limits.vocab_size)
        core = EngineCore(launch.config, device_limits, runtime_info, executor, port, clock, masker)
        signal.signal(signal.SIGTERM, stop)
        gc.freeze()  # garbage collections stop the loop: keep them from traversing what was loaded and stays
        report(StatusReport("ready", startup=device_limits.startup))
        while not stopping:
            begun = thread_time()
            core.turn(wait=HEARTBEAT_S)
            core.record_turn(thread_time() - begun)
    except BaseException as error:
        port.announce_death(one_line_error(error))
        raise
    finally:
        if masker is not None:
            masker.close()
        executor.close()
        port.close()
