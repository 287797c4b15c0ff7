"""What parent and child say to each other, and what a parent learns of its child's end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from quire.foundation.config import Config
from quire.foundation.processes.child_process import ChildProcess
from quire.foundation.processes.launch import LaunchConfig, Report, SwapRequest
from quire.foundation.processes.orders import OpenModel
from quire.foundation.processes.pipe_lines import wait_readable


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


LARGE = Config().with_values(model="a", chat_template="{{ messages }}" + 20_000 * "{# long #}")
"""Settings that no pipe has room for, but all reports of them together: a reader that is slow misses nothing."""


def launch_of(config: Config, **fields: bool) -> LaunchConfig:
    return LaunchConfig(config, "", takes_orders=True, **fields)


@contextmanager
def repeating_child(launch: LaunchConfig) -> Iterator[ChildProcess]:
    """One that reports settings that it is told."""
    started = ChildProcess("child", "tests.processes.repeating_child", launch)
    try:
        yield started
    finally:
        started.kill()
        started.cause_of_death()
        started.close()


def next_reports(child: ChildProcess, count: int) -> list[Report]:
    """So many reports, in order."""
    reports: list[Report] = []
    while len(reports) < count:
        wait_readable(child.report_fd)
        reports += child.reports()
        assert child.exit_code() is None or len(reports) >= count, child.cause_of_death()
    return reports


def test_messages_larger_than_a_pipe_arrive_whole_in_both_directions() -> None:
    small = Config().with_values(model="b")
    told = [LARGE, small, LARGE, small]
    with repeating_child(launch_of(LARGE)) as child:
        for config in told:
            child.tell(OpenModel(launch_of(config), 0.0))
        reports = next_reports(child, 1 + len(told))
        child.tell(OpenModel(launch_of(Config().with_values(model="")), 0.0))
        wait_readable(child.pid_fd)
        assert child.exit_code() == 0
    heard = [report.config for report in reports if isinstance(report, SwapRequest)]
    assert heard == [LARGE, *told]


def test_a_broken_report_is_left_out_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    with repeating_child(launch_of(Config(), developer_mode=True)) as child:
        (report,) = next_reports(child, 1)
    assert isinstance(report, SwapRequest)
    assert "A report of the child process cannot be read" in caplog.text


def test_a_child_that_dies_before_it_reads_its_settings_is_a_death_like_others() -> None:
    launch = LaunchConfig(LARGE, "")
    dead = ChildProcess("child", "tests.processes.no_such_module", launch)
    try:
        wait_readable(dead.pid_fd)
        assert dead.cause_of_death() == "it exited with code 1"
    finally:
        dead.close()
