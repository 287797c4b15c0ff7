"""Processes that compile kernels for this one. Imports no Triton, so that they can start before it is imported.

Triton's front end holds the interpreter's lock, so threads hardly compile side by side, and other threads wait for
them. The processes are children of one child (`compiler`), which starts before this process imports anything large, is
ready before a kernel is requested, and needs no torch. Compiled kernels are in Triton's cache on disk. A request for a
kernel that is there already is answered in milliseconds, so all kernels are requested.

Nothing depends on the processes: where they fail, are gone or never were, this process compiles. They exit when all is
done, and when this process is gone, however it ended.
"""

from __future__ import annotations

import heapq
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import Future, thread
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from triton.runtime.jit import JITFunction

MIN_CORES = 4
"""With fewer cores threads are faster, because preparing processes takes longer than the lock costs."""
_MOST = 16
"""The maximum number of processes: the longest of the about fifty kernels takes as long as a dozen processes need for
all others."""
_PROGRAM = "import sys; sys.path[:] = {}; from quire.compute.kernels.triton.launching.compiler import main; main({})"
_LEAVING_S = 5.0
"""The maximum time that the processes may take to end."""
_log = logging.getLogger(__name__)


def start_compiler_processes(cores: int) -> CompilerProcesses | None:
    """Start a process for each core, at most _MOST; None if threads are as fast, or no process can start."""
    if cores < MIN_CORES:
        return None
    try:
        return CompilerProcesses(min(cores, _MOST))
    except (OSError, RuntimeError) as error:  # limits of processes and of threads
        _log.info("kernels     compiled by threads: no other process could be begun: %s", error)
        return None


@dataclass(frozen=True, order=True)
class _Job:
    """A kernel to compile; the most urgent job is the smallest."""

    deferred: bool
    number: int
    request: dict[str, Any] = field(compare=False)
    done: Future[bool] = field(compare=False, default_factory=Future)


class CompilerProcesses:
    """Processes that compile at the same time, and a thread for each that hands it one kernel after another."""

    def __init__(self, number: int) -> None:
        pairs = [socket.socketpair() for _ in range(number)]
        theirs = [their.fileno() for _, their in pairs]
        try:
            # multiprocessing would import the user's main module. In a session of its own it does not get Ctrl-C.
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM.format([*map(str, sys.path)], theirs)],
                pass_fds=theirs,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        finally:
            for _, their in pairs:
                their.close()
        self._channels = [ours for ours, _ in pairs]
        self._changed = threading.Condition()  # guards what follows
        self._jobs: list[_Job] = []  # a heap
        self._asked = 0
        self._may_begin_deferred = False  # whether deferred jobs may begin
        self._ending = False  # nobody will ask any more
        self._num_workers = number  # threads
        self._threads = [
            threading.Thread(target=self._feed_worker, args=(ours,), daemon=True) for ours in self._channels
        ]
        try:
            for each in self._threads:
                each.start()
        except RuntimeError:
            self._kill()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def submit(
        self, function: JITFunction[Any], specialization: str, target: dict[str, Any], *, deferred: bool = False
    ) -> Future[bool]:
        """Have one compilation of Triton's function, which is at the top of one of our modules, made if it is not on
        disk. Returns whether it is on disk then.

        Target and specialization are as in `compiler.py`. A deferred one is compiled after all others, and not before
        `release`.
        """
        request = {
            "module": function.fn.__module__,
            "name": function.fn.__qualname__,
            "target": target,
            "specialization": specialization,
            "deferred": deferred,
        }
        with self._changed:
            self._asked += 1
            job = _Job(deferred, self._asked, request)
            if self._ending or not self._num_workers:
                job.done.set_result(False)
            else:
                heapq.heappush(self._jobs, job)
                self._changed.notify()
        return job.done

    def release(self) -> None:
        """Let deferred jobs begin, because all urgent ones have been submitted."""
        with self._changed:
            self._may_begin_deferred = True
            self._changed.notify_all()

    def finish(self) -> None:
        """Let the processes end when all jobs are done, because nothing more will be submitted."""
        with self._changed:
            self._ending = self._may_begin_deferred = True
            self._changed.notify_all()

    def close(self) -> None:
        """End the processes at once, and return when they are gone. Their children, such as ptxas, end soon after."""
        self.finish()
        self._fail_pending()
        for channel in self._channels:
            _shut_down(channel)
        self._process.terminate()
        for each in self._threads:
            each.join()

    def _kill(self) -> None:
        """Kill all processes and their children, such as C compilers, which have a session of their own."""
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _feed_worker(self, channel: socket.socket) -> None:
        """Give one process the most urgent job, again and again, until none is left."""
        with channel:
            while (job := self._next_job()) is not None:
                try:
                    error = _request(channel, job.request)
                except Exception as gone:  # nobody shall wait for the job for ever
                    _log.debug("kernels     a process that compiles is gone: %r", gone)
                    job.done.set_result(False)
                    break
                if error:
                    _log.info("kernels     %s was not compiled by another process: %s", job.request["name"], error)
                job.done.set_result(not error)
            _shut_down(channel)
        with self._changed:
            self._num_workers -= 1
            is_last = not self._num_workers
        if is_last:
            if not self._ending:
                _log.info("kernels     compiled by threads from now on: no other process is left")
            self._fail_pending()
            self._wait_or_kill()

    def _next_job(self) -> _Job | None:
        """Wait for the most urgent job and return it; None if there will be no more."""

        def is_there() -> bool:
            return bool(self._jobs) and (self._may_begin_deferred or not self._jobs[0].deferred)

        with self._changed:
            self._changed.wait_for(lambda: is_there() or (self._ending and not self._jobs))
            if thread._shutdown:  # the interpreter ends, and would wait for all that is left
                self._fail_pending()
            return heapq.heappop(self._jobs) if self._jobs else None

    def _fail_pending(self) -> None:
        """Answer all jobs that have not begun with False, so that this process compiles them."""
        with self._changed:
            jobs, self._jobs = self._jobs, []
        for job in jobs:
            job.done.set_result(False)

    def _wait_or_kill(self) -> None:
        """Wait until the compiling processes have ended; kill them if that takes too long."""
        try:
            self._process.wait(_LEAVING_S)
        except subprocess.TimeoutExpired:
            self._kill()
            self._process.wait()


def _shut_down(channel: socket.socket) -> None:
    """Close the connection for the other end too, even if a child of this process holds this end open."""
    with suppress(OSError):  # it is closed already
        channel.shutdown(socket.SHUT_RDWR)


def _request(channel: socket.socket, request: dict[str, Any]) -> str:
    """Send a request to a process, and return the error message, or ""."""
    channel.sendall(json.dumps(request).encode() + b"\n")
    answer = b""
    while not answer.endswith(b"\n"):
        if not (part := channel.recv(1 << 16)):
            raise ConnectionResetError("it has closed its socket")
        answer += part
    error: str = json.loads(answer)["error"]
    return error
