"""Processes that compile answer each request, in their order, and nobody waits for one that is gone or stays behind."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire.compute.kernels.triton.launching import compiler_processes
from quire.compute.kernels.triton.launching.compiler_processes import CompilerProcesses, start_compiler_processes

SECONDS = 120
TARGET = {"backend": "cuda", "arch": 90, "warp_size": 32}


@pytest.fixture
def two() -> Iterator[CompilerProcesses]:
    made = CompilerProcesses(2)
    yield made
    for worker in workers_of(made):
        os.kill(worker, signal.SIGCONT)
    made.close()


def ask(processes: CompilerProcesses, name: str = "f", module: str = "no_such_module", **how: Any) -> Future[bool]:
    """For a kernel that is nowhere: it is refused at once."""
    function: Any = SimpleNamespace(fn=SimpleNamespace(__module__=module, __qualname__=name))
    return processes.submit(function, "{}", TARGET, **how)


def children_of(pid: int) -> list[int]:
    processes = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return [each for each in processes if status_of(each)[1:2] == [str(pid)]]


def status_of(pid: int) -> list[str]:
    """Its state, its parent and more, see proc(5); nothing if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def workers_of(processes: CompilerProcesses, number: int = 0) -> list[int]:
    """Process ids, once there are so many, each with a socket of its own."""
    until(lambda: sum(sockets_of(child) == 1 for child in children_of(processes.pid)) >= number)
    return children_of(processes.pid)


def sockets_of(pid: int) -> int:
    with suppress(OSError):
        return sum("socket" in os.readlink(descriptor) for descriptor in Path(f"/proc/{pid}/fd").iterdir())
    return 0


def is_there(pid: int) -> bool:
    """Whether a process has not ended, whether that was noted by its parent or not."""
    return status_of(pid)[:1] not in ([], ["Z"])


def until(come_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not come_true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_errors_come_back(two: CompilerProcesses, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert ask(two, "lost").result(SECONDS) is False
    assert ask(two, module="quire.compute.kernels.triton.step_inputs").result(SECONDS) is False
    assert "lost was not compiled by another process: ModuleNotFoundError" in caplog.text
    assert "f was not compiled by another process: AttributeError" in caplog.text


def test_what_has_time_comes_last_and_not_before_it_may() -> None:
    one, order = CompilerProcesses(1), []
    jobs = {name: ask(one, name, deferred=name in "ac") for name in "abcd"}
    for name, job in jobs.items():
        job.add_done_callback(lambda _, name=name: order.append(name))  # type: ignore[misc]
    jobs["d"].result(SECONDS)
    time.sleep(0.05)
    until(lambda: len(order) >= 2)  # who waits for a job may be told before its callbacks are
    assert order == ["b", "d"]
    one.release()
    until(lambda: len(order) >= 4)
    assert order == ["b", "d", "a", "c"]
    one.close()


def test_they_leave_when_all_is_done(two: CompilerProcesses) -> None:
    jobs = [ask(two, deferred=True) for _ in range(3)]
    family = [two.pid, *workers_of(two, 2)]
    two.finish()
    assert [job.result(SECONDS) for job in jobs] == [False] * 3
    until(lambda: not Path(f"/proc/{two.pid}").exists())
    assert not any(is_there(pid) for pid in family)
    assert ask(two).result(SECONDS) is False, "nobody is there to ask"


def test_closing_ends_them_whatever_they_are_at(two: CompilerProcesses) -> None:
    workers = workers_of(two, 2)
    for worker in workers:
        os.kill(worker, signal.SIGSTOP)
    jobs = [ask(two) for _ in range(5)]
    began = time.monotonic()
    two.close()
    assert time.monotonic() - began < compiler_processes._LEAVING_S / 2
    assert [job.result(0) for job in jobs] == [False] * 5
    assert not any(Path(f"/proc/{pid}").exists() for pid in (two.pid, *workers)), "none is left, and none unnoticed"


def test_closing_before_they_are_ready() -> None:
    processes = CompilerProcesses(2)
    job = ask(processes)
    processes.close()
    assert job.result(0) is False
    assert not is_there(processes.pid)


def test_who_waits_for_one_that_dies_is_told(two: CompilerProcesses, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    workers = workers_of(two, 2)
    for worker in workers:
        os.kill(worker, signal.SIGSTOP)
    jobs = [ask(two) for _ in range(4)]
    os.kill(workers[0], signal.SIGKILL)
    until(lambda: any(job.done() for job in jobs))
    assert "no other process is left" not in caplog.text
    os.kill(workers[1], signal.SIGKILL)
    assert [job.result(SECONDS) for job in jobs] == [False] * 4
    until(lambda: "no other process is left" in caplog.text)
    assert ask(two).result(SECONDS) is False


def test_they_leave_when_the_parent_is_killed() -> None:
    parent = _parent("print(processes.pid, flush=True); time.sleep(99)", stdout=subprocess.PIPE, text=True)
    assert parent.stdout
    child = int(parent.stdout.readline())
    until(lambda: len(children_of(child)) == 2)
    family = [child, *children_of(child)]
    parent.kill()
    parent.wait()
    parent.stdout.close()
    until(lambda: not any(is_there(pid) for pid in family))


def test_an_interpreter_that_ends_waits_for_what_is_under_way_alone() -> None:
    parent = _parent(
        "from concurrent.futures import ThreadPoolExecutor\n"
        "compiler_processes._request = lambda *_: time.sleep(0.5) or ''\n"
        "function = SimpleNamespace(fn=SimpleNamespace(__module__='m', __qualname__='f'))\n"
        "ThreadPoolExecutor(1).submit([processes.submit(function, '', {}) for _ in range(200)][-1].result)"
    )
    assert parent.wait(SECONDS) == 0


def test_as_many_as_help_and_none_for_few_cores(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert start_compiler_processes(compiler_processes.MIN_CORES - 1) is None
    assert not caplog.text
    monkeypatch.setattr(compiler_processes, "CompilerProcesses", lambda number: number)
    assert [start_compiler_processes(cores) for cores in (4, 5, 200)] == [4, 5, compiler_processes._MOST]
    monkeypatch.undo()
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    assert start_compiler_processes(compiler_processes.MIN_CORES) is None
    assert "compiled by threads" in caplog.text


def _parent(does: str, **how: Any) -> subprocess.Popen[Any]:
    """A process that has two that compile."""
    program = (
        "import time\nfrom types import SimpleNamespace\n"
        "from quire.compute.kernels.triton.launching import compiler_processes\n"
        f"processes = compiler_processes.CompilerProcesses(2)\n{does}"
    )
    return subprocess.Popen([sys.executable, "-c", program], **how)
