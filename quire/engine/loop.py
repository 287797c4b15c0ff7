"""The loop of an engine process: turn after turn, with a pulse a second for who watches it."""

from __future__ import annotations

from collections.abc import Callable
from time import thread_time

from quire.engine.core import HEARTBEAT_S, EngineCore
from quire.foundation.clock import Clock
from quire.foundation.processes.launch import PULSE_S, SendReport


def turn_until(stopping: Callable[[], bool], core: EngineCore, clock: Clock, report: SendReport) -> None:
    """Turn the engine's loop until it is to stop.

    Args:
        stopping: Whether it is to stop.
        core: The engine.
        clock: For the pulses.
        report: Gets the pulses.
    """
    next_pulse = 0.0
    while not stopping():
        begun = thread_time()
        core.turn(wait=HEARTBEAT_S)
        core.record_turn(thread_time() - begun)
        if (now := clock.now()) >= next_pulse:
            next_pulse = now + PULSE_S
            report(core.pulse())
