"""What a dead engine was working on can be read after its death, and nothing else."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from quire.engine.flight_record import FlightRecorder, requests_in_flight
from quire.foundation.messages.from_engine import EngineId

ENGINE = EngineId(0, 3)


def test_the_requests_of_plans_in_flight_outlive_a_killed_process(tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        recorder = FlightRecorder(tmp_path, ENGINE, places=2, rows=4)
        recorder.submitted(1, [1, 2])
        recorder.finished(1)
        recorder.submitted(2, [3 << 48, 4])
        recorder.submitted(3, [4, 5, 6, 7])
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert requests_in_flight(tmp_path, EngineId(0, 2)) == []
    assert requests_in_flight(tmp_path, ENGINE) == [4, 5, 6, 7, 3 << 48]
    assert requests_in_flight(tmp_path, ENGINE) == [], "it is removed"


def test_finished_plans_are_not_in_flight_and_a_request_that_is_being_added_is(tmp_path: Path) -> None:
    recorder = FlightRecorder(tmp_path, ENGINE, places=2, rows=4)
    for step in range(1, 6):
        recorder.submitted(step, [step, step + 100])
        recorder.finished(step - 1)
    recorder.handling(9)
    recorder.handling(0)
    recorder.handling(77)
    assert requests_in_flight(tmp_path, ENGINE) == [5, 77, 105]
    idle = FlightRecorder(tmp_path, ENGINE, places=2, rows=4)
    idle.submitted(1, [5])
    idle.finished(1)
    assert requests_in_flight(tmp_path, ENGINE) == []


@pytest.mark.parametrize("content", [b"", b"\x00" * 24, b"\xff" * 7, b"\xff" * 100, b"\x01" * 100])
def test_a_record_that_makes_no_sense_does_no_harm(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "flight-0-3").write_bytes(content)
    assert len(requests_in_flight(tmp_path, ENGINE)) <= 1


def test_a_plan_with_more_rows_than_slots_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        FlightRecorder(tmp_path, ENGINE, places=2, rows=2).submitted(1, [1, 2, 3])
