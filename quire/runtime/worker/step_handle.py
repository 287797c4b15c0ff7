"""Handles of launched steps: the result once the device is done, and the time that the step took."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import msgspec
import torch

from quire.foundation.messages.workers import Result, TokenBitmasks, Vector
from quire.runtime.worker.async_scheduling import MAX_STEPS_IN_FLIGHT


class LaunchedStep:
    """A step that is launched to its end. `finish` makes the result from the outputs on the host, once the GPU event
    `ended` has passed; `ended` is None if the step is already over, as on a CPU."""

    def __init__(self, finish: Callable[[], Result], ended: torch.cuda.Event | None = None) -> None:
        self._finish = finish
        self._ended = ended

    def done(self) -> bool:
        """Whether `result` would not wait."""
        return self._ended is None or bool(self._ended.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        if self._ended is not None:
            self._ended.synchronize()

    def result(self) -> Result:
        """Wait for the device and return the step's result. Called once."""
        self.wait()
        return self._finish()


class MaskedStepHandle:
    """A launched step whose masked rows are sampled once their bitmasks arrive. `sample` launches the rest of the step,
    and `wait` waits for what was launched before."""

    def __init__(self, sample: Callable[[TokenBitmasks], StepHandle], wait: Callable[[], None]) -> None:
        self._sample = sample
        self._wait = wait
        self._whole: StepHandle | None = None

    def submit_bitmasks(self, masks: TokenBitmasks) -> None:
        """Launch the rest of the step with its bitmasks. Called once."""
        assert self._whole is None, "bitmasks come twice"
        self._whole = self._sample(masks)

    def done(self) -> bool:
        return self._whole is not None and self._whole.done()

    def wait(self) -> None:
        """Wait until the device has finished what is launched so far."""
        if self._whole is None:
            self._wait()
        else:
            self._whole.wait()

    def result(self) -> Result:
        assert self._whole is not None, "the result of a step whose bitmasks are missing"
        return self._whole.result()


class PooledStepHandle:
    """A launched step whose result has vectors of texts as well, which `vectors` collects once the device is done."""

    def __init__(self, step: StepHandle, vectors: Callable[[], list[Vector]]) -> None:
        self._step = step
        self._vectors = vectors
        self.done: Callable[[], bool] = step.done
        self.wait: Callable[[], None] = step.wait

    def result(self) -> Result:
        """Wait for the device and return the step's result. Called once."""
        return msgspec.structs.replace(self._step.result(), vectors=self._vectors())


StepHandle = LaunchedStep | MaskedStepHandle | PooledStepHandle
Events = tuple[torch.cuda.Event, torch.cuda.Event]
"""The beginning and the end of a step on a stream."""


class StepTimer:
    """Times a step: on a CPU by the clock while the step is launched, on a GPU by events on its `stream`."""

    def __init__(self, stream: torch.cuda.Stream | None = None, events: Events | None = None) -> None:
        self._stream = stream
        self._events = events
        self._began = time.perf_counter()

    def stop(self, finish: Callable[[float], Result]) -> StepHandle:
        """End the step; `finish` receives its duration in milliseconds, on a GPU once the device is done."""
        if self._events is None:
            result = finish((time.perf_counter() - self._began) * 1e3)
            return LaunchedStep(lambda: result)
        began, ended = self._events
        ended.record(self._stream)
        return LaunchedStep(lambda: finish(began.elapsed_time(ended)), ended)

    def wait(self) -> None:
        """Wait until the device has finished what is launched so far."""
        if self._stream is not None:
            self._stream.synchronize()


class StepTimers:
    """Makes a timer for each step, on a CPU or on a GPU's current stream. Events are reused in turn.

    Args:
        in_flight: Maximum steps in flight. One more pair of events is needed, because the end of a step may serve as
            the beginning of the next.
    """

    def __init__(self, device: torch.device, in_flight: int = MAX_STEPS_IN_FLIGHT) -> None:
        self._device = device
        number = in_flight + 1 if device.type != "cpu" else 0
        self._events = itertools.cycle([(_timed_event(), _timed_event()) for _ in range(number)])
        self._last: torch.cuda.Event | None = None

    def start(self) -> StepTimer:
        """Begin a step now, or at the recorded end of the step before if that still runs."""
        if self._device.type == "cpu":
            return StepTimer()
        stream = torch.cuda.current_stream(self._device)
        began, ended = next(self._events)
        if self._last is None or self._last.query():  # type: ignore[no-untyped-call]
            began.record(stream)
        else:
            began = self._last
        self._last = ended
        return StepTimer(stream, (began, ended))


def _timed_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
