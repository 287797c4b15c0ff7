"""A process that makes no progress is told from one that is starting, busy, or was not given any time."""

from __future__ import annotations

from quire.foundation.processes.launch import Pulse
from quire.serving.supervisor.watchdog import SILENT_S, STOPPED_S, TICK_S, Watchdog
from tests.engine.test_client_liveness import ManualClock


class Watched:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.state = "S"
        self.dog = Watchdog(1, self.clock, lambda pid: self.state)

    def complaint_after(self, seconds: float) -> str:
        """What is said first within so many seconds of ticks."""
        for _ in range(round(seconds / TICK_S)):
            self.clock.time += TICK_S
            if complaint := self.dog.complaint():
                return complaint
        return ""


def test_a_start_may_take_as_long_as_it_takes() -> None:
    assert Watched().complaint_after(1_000) == ""


def test_a_stopped_process_is_noticed_within_seconds() -> None:
    watched = Watched()
    watched.dog.heard(Pulse())
    watched.state = "T"
    assert watched.complaint_after(STOPPED_S - TICK_S) == ""
    watched.state = "S"
    assert watched.complaint_after(1.0) == "", "it goes on"
    watched.state = "T"
    assert "SIGSTOP" in watched.complaint_after(STOPPED_S)


def test_a_silent_process_is_stuck() -> None:
    watched = Watched()
    watched.dog.heard(Pulse())
    assert watched.complaint_after(SILENT_S - 1) == ""
    watched.dog.heard(Pulse())
    assert watched.complaint_after(SILENT_S - 1) == ""
    assert "nothing was heard" in watched.complaint_after(2)


def test_a_step_that_takes_too_long_is_stuck_however_alive_the_process_is() -> None:
    watched = Watched()
    for stalled in range(5):
        watched.dog.heard(Pulse(stalled, 4.0))
        assert watched.complaint_after(1) == ""
    watched.dog.heard(Pulse(5, 4.0))
    assert "a step took more than 4.0 s" in watched.complaint_after(1)


def test_nobody_is_blamed_when_the_whole_machine_stood_still() -> None:
    watched = Watched()
    watched.dog.heard(Pulse())
    watched.clock.time += 3_600
    assert watched.dog.complaint() == ""
    assert watched.complaint_after(SILENT_S - 2) == ""
