"""What the engine process does; `quire.engine.start` is its entry."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import thread_time
from types import FrameType

from quire.engine.adapter_registry import load_modules
from quire.engine.build import build_model_runtime_info
from quire.engine.client import ZmqPort
from quire.engine.core import HEARTBEAT_S, EngineCore
from quire.engine.flight_record import FlightRecorder
from quire.engine.thinking_budgets import bitmask_source
from quire.foundation.clock import Clock, SystemClock
from quire.foundation.config import Config
from quire.foundation.processes import garbage
from quire.foundation.processes.launch import PULSE_S, STOP_ENGINE, GroupEnds, LaunchConfig, SendReport, StatusReport
from quire.foundation.processes.shared_memory import HostBlockMemory
from quire.models.spec import spec_of
from quire.planning.kv_contents import contents_digest
from quire.planning.step_limits import StepLimits
from quire.runtime.executor.executor import Executor
from quire.runtime.executor.factory import build_executor
from quire.scheduling.kvcache.host_index import HostIndex, index_bytes

_log = logging.getLogger(__name__)


def main(
    launch: LaunchConfig,
    report: SendReport,
    make_executor: Callable[[Config, Clock, GroupEnds | None, memoryview | None], Executor] = build_executor,
) -> None:
    """Load the model, then turn the loop until STOP_ENGINE. What fails is not closed: the process ends at once."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the supervisor says when it is time to end
    stopping = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopping
        stopping = True

    clock, config, directory = SystemClock(), launch.config, Path(launch.directory)
    port = ZmqPort(directory, launch.engine)
    memory = host_block_memory(launch)
    executor = make_executor(config, clock, launch.group, None if memory is None else memory.blocks)
    device_limits = executor.start()
    runtime_info = build_model_runtime_info(config, spec_of(config.model))
    if memory is not None:
        contents = contents_digest(config, config.cache.kv_offloading_size)
        index = HostIndex(memory.index[: index_bytes(device_limits.num_host_blocks)], contents)
        runtime_info = replace(runtime_info, host_index=index)
    masker = bitmask_source(config, device_limits.vocab_size)
    flight = FlightRecorder(directory, launch.engine, executor.max_in_flight, StepLimits.of(config).rows)
    adapters = load_modules(config.lora, executor.orders, is_restart=launch.engine.epoch > 0)
    core = EngineCore(config, device_limits, runtime_info, executor, port, clock, masker, flight, adapters)
    signal.signal(STOP_ENGINE, stop)
    garbage.begin_serving()
    report(StatusReport("ready", startup=device_limits.startup))
    turn_until(lambda: stopping, core, clock, garbage.collecting(report, lambda: core.num_requests))
    if masker is not None:
        masker.close()
    executor.close()
    port.close()


def host_block_memory(launch: LaunchConfig) -> HostBlockMemory | None:
    """Open the memory for host blocks that outlives this process; None if there is none."""
    if not launch.host_memory:
        return None
    try:
        return HostBlockMemory(launch.config.cache.host_bytes(launch.config.parallel.ranks), launch.host_memory)
    except OSError as error:
        _log.warning("host pool   is of this process alone, and lost when it dies: %s", error)
        return None


def turn_until(stopping: Callable[[], bool], core: EngineCore, clock: Clock, report: SendReport) -> None:
    """Turn the engine's loop until `stopping` is true; `report` gets pulses by `clock`."""
    next_pulse = 0.0
    while not stopping():
        begun = thread_time()
        core.turn(wait=HEARTBEAT_S)
        core.record_turn(thread_time() - begun)
        if (now := clock.now()) >= next_pulse:
            next_pulse = now + PULSE_S
            report(core.pulse())
