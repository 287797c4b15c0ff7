"""What a parent learns of its child's end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from quire.config import Config
from quire.processes.child_process import ChildProcess
from quire.processes.launch import LaunchConfig
from quire.processes.readable import wait_readable


@contextmanager
def child(message: str = "") -> Iterator[ChildProcess]:
    """One that fails with this message."""
    launch = LaunchConfig(Config().with_values(model=message), "")
    started = ChildProcess("child", "tests.processes.failing_child", launch)
    try:
        yield started
    finally:
        started.kill()
        started.cause_of_death()
        started.close()


@pytest.mark.parametrize("message", ["Rank 1 died: it was ended by SIGKILL.", "A block is lost"])
def test_a_cause_of_death_ends_without_a_full_stop(message: str) -> None:
    """Sentences go on behind it, or end."""
    with child(message) as failed:
        wait_readable(failed.pid_fd)
        assert failed.cause_of_death() == message.removesuffix(".")
        assert failed.failure is not None
        assert failed.failure.message == message


def test_so_does_why_it_was_killed() -> None:
    with child() as stuck:
        stuck.kill("The model could not be restored.")
        assert stuck.cause_of_death() == "The model could not be restored"
