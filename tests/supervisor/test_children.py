"""Processes that are replaced, on a machine where none is really started."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import MagicMock

from quire.foundation.config import Config
from quire.foundation.processes.launch import LaunchConfig
from quire.serving.supervisor.children import LONGEST_DELAY_S, MODULES, Children
from quire.serving.supervisor.process_host import ProcessHost
from tests.engine.test_client_liveness import ManualClock
from tests.supervisor.machine import FakeChild


def start(name: str, module: str, launch: LaunchConfig) -> FakeChild:
    return FakeChild(name, launch, launch.engine.epoch + 1, lambda child, number: None)


def test_a_process_that_never_starts_is_tried_for_ever_and_not_too_often(tmp_path: Path) -> None:
    clock = ManualClock()
    host = ProcessHost(start=start, notices=MagicMock(), in_flight=lambda directory, engine: [], state=lambda pid: "S")
    children = Children(LaunchConfig(Config(), str(tmp_path)), MODULES, clock, host)
    children.ready(children.engines[0])
    waits = []
    for _ in range(1_100):  # 2 ** 1,024 is no float
        before, died = children.engines[0], clock.time
        children.replace_engine(children.model, 0, "it died", [])
        while children.engines[0] is before:
            clock.time += 0.5
            children.start_due()
        waits.append(clock.time - died)
    assert waits[:7] == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, LONGEST_DELAY_S]
    assert set(waits[6:]) == {LONGEST_DELAY_S}
