"""Processor time of the event loop's callbacks."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Coroutine
from typing import Any

import pytest

from quire.engine.metrics.histogram import WorkTimes
from quire.serving.api.event_loop import MeasuredLoop


def run(work: Coroutine[Any, Any, None]) -> WorkTimes:
    times = WorkTimes()
    with asyncio.Runner(loop_factory=lambda: MeasuredLoop(times)) as runner:
        runner.run(work)
    return times


def compute(seconds: float) -> None:
    """Take so much processor time."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


async def in_a_task() -> None:
    compute(0.15)


async def in_a_callback() -> None:
    asyncio.get_running_loop().call_soon(compute, 0.15)
    await asyncio.sleep(0)


async def in_a_timer() -> None:
    asyncio.get_running_loop().call_later(0.001, compute, 0.15)
    await asyncio.sleep(0.01)


async def from_a_thread() -> None:
    loop = asyncio.get_running_loop()
    await asyncio.to_thread(loop.call_soon_threadsafe, compute, 0.15)
    await asyncio.sleep(0)


async def from_a_descriptor() -> None:
    loop = asyncio.get_running_loop()
    reading, writing = os.pipe()
    try:
        os.write(writing, b"!")
        loop.add_reader(reading, compute, 0.15)
        await asyncio.sleep(0.01)
    finally:
        loop.remove_reader(reading)
        os.close(reading)
        os.close(writing)


@pytest.mark.parametrize("work", [in_a_task, in_a_callback, in_a_timer, from_a_thread, from_a_descriptor])
def test_a_long_callback_is_measured_and_named(work: Any, caplog: pytest.LogCaptureFixture) -> None:
    times = run(work())
    assert 0.15 <= times.longest < 0.3
    assert times.seconds.sum >= 0.15
    named = "in_a_task" if work is in_a_task else "compute"
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(lines) == 1
    assert lines[0].startswith(f"{named} held the event loop for 1")


def test_waiting_is_not_work() -> None:
    async def waits() -> None:
        time.sleep(0.2)  # as it would for the interpreter lock, or for another process
        await asyncio.sleep(0.05)

    assert run(waits()).longest < 0.1


def test_short_callbacks_are_all_counted_and_do_not_add_up() -> None:
    async def many() -> None:
        for _ in range(2_000):
            await asyncio.sleep(0)

    times = run(many())
    assert times.seconds.count >= 2_000
    assert times.longest < 0.1
