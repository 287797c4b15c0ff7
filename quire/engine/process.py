"""The engine process: `python -m quire.engine.process`, started by the supervisor."""

from __future__ import annotations

import gc
import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from quire.clock import SystemClock
from quire.engine.build import traits_of
from quire.engine.core import BEAT_S, EngineCore
from quire.engine.transport import ZmqPort
from quire.executor.choice import executor_for
from quire.models.spec import read_spec
from quire.processes import child


def main(launch: child.Launch, report: Callable[[child.Report], None]) -> None:
    """Load the model, then turn the loop until SIGTERM."""
    stopping = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopping
        stopping = True

    clock = SystemClock()
    port = ZmqPort(Path(launch.directory))
    executor = executor_for(launch.config, clock)
    try:
        sizing = executor.start()
        traits = traits_of(launch.config, read_spec(launch.config.model.model))
        core = EngineCore(launch.config, sizing, traits, executor, port, clock)
        signal.signal(signal.SIGTERM, stop)
        gc.freeze()  # what is loaded now stays: collections, which stop the loop, need not look at it again
        report(child.Report("ready", startup=sizing.startup))
        while not stopping:
            core.turn(wait=BEAT_S)
    except BaseException as error:
        port.announce_death(child.one_line(error))
        raise
    finally:
        executor.close()
        port.close()


if __name__ == "__main__":
    child.run(main)
