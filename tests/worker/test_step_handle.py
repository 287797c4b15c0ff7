"""When a step on a GPU's stream began: with its launch, or as the step before it ended."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quire.foundation.messages.workers import Result
from quire.runtime.worker import step_handle
from quire.runtime.worker.step_handle import StepHandle, StepTimers


class FakeGpu:
    """Its clock, in milliseconds, and how far its stream has come."""

    def __init__(self) -> None:
        self.launched = 0.0
        self.now = 0.0
        self.records = 0

    def event(self) -> Any:
        """Of torch's kind: it passes when the stream has come to the work that was launched before it."""
        event = SimpleNamespace(at=0.0)

        def record(stream: object) -> None:
            event.at = max(self.launched, self.now)
            self.records += 1

        event.record, event.query = record, lambda: event.at <= self.now
        event.synchronize = lambda: setattr(self, "now", max(self.now, event.at))
        event.elapsed_time = lambda end: end.at - event.at
        return event


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    gpu = FakeGpu()
    monkeypatch.setattr(step_handle, "_timed_event", gpu.event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    return gpu


def launch(gpu: FakeGpu, timers: StepTimers, ms: float) -> StepHandle:
    timer = timers.start()
    gpu.launched = max(gpu.launched, gpu.now) + ms
    return timer.stop(lambda took: Result(0, [], [], device_ms=took))


def test_back_to_back_steps_take_their_own_time(gpu: FakeGpu) -> None:
    """With as many in flight as may be; the result of each is taken before the next is launched."""
    timers, handles, found = StepTimers(torch.device("cuda")), [], []
    for ms in (3.0, 5.0, 2.0, 7.0, 1.0, 4.0):
        handles.append(launch(gpu, timers, ms))
        if len(handles) == 2:
            found.append(handles.pop(0).result().device_ms)
    assert found == [3.0, 5.0, 2.0, 7.0, 1.0]
    assert gpu.records == 7, "one end each, and one beginning"


def test_a_pause_belongs_to_no_step(gpu: FakeGpu) -> None:
    timers = StepTimers(torch.device("cuda"))
    for ms in (3.0, 5.0, 2.0):
        assert launch(gpu, timers, ms).result().device_ms == ms
        gpu.now += 100
