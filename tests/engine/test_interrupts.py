from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from quire.engine.inprocess import InterruptGuard


@pytest.fixture(autouse=True)
def handler_of_the_process() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_process_that_ignores_interrupts_goes_on_ignoring_them() -> None:
    guard = InterruptGuard()
    guard.install()
    guard.uninstall()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    guard.install()
    guard.uninstall()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_a_handler_that_came_meanwhile_stays() -> None:
    guard = InterruptGuard()
    guard.install()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    guard.uninstall()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
