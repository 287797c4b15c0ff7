"""Processes that compile kernels for this one. Triton's front end holds the interpreter's lock: threads hardly compile
side by side, and who else computes here waits for them.

They are children of one child, see `compiler`. It is begun before this process imports anything large, is ready before
anybody asks for a kernel, and needs no torch. What is compiled there lies in Triton's cache on disk. Whoever asks for a
kernel that lies there already has his answer in milliseconds, so all kernels are asked for.

Nothing depends on them: where they fail, are gone or never were, whoever asked compiles by himself. They leave when all
is done, and when this process is gone, however it ended. Imports no Triton, so that they can begin before it is there.
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
"""With fewer cores threads compile sooner: preparing processes takes longer than the lock costs."""
_MOST = 16
"""Of the some fifty kernels of a start, the longest takes as long as a dozen processes need for all others."""
_PROGRAM = "import sys; sys.path[:] = {}; from quire.compute.kernels.triton.launching.compiler import main; main({})"
_LEAVING_S = 5.0
"""What it may take the processes to end."""
_log = logging.getLogger(__name__)


def start_compiler_processes(cores: int) -> CompilerProcesses | None:
    """As many as there are cores, at most _MOST; None where threads do as well, or where there can be none."""
    if cores < MIN_CORES:
        return None
    try:
        return CompilerProcesses(min(cores, _MOST))
    except (OSError, RuntimeError) as error:  # limits of processes and of threads
        _log.info("kernels     compiled by threads: no other process could be begun: %s", error)
        return None


@dataclass(frozen=True, order=True)
class _Job:
    """A kernel to compile; the most urgent is the least."""

    deferred: bool
    number: int
    request: dict[str, Any] = field(compare=False)
    done: Future[bool] = field(compare=False, default_factory=Future)


class CompilerProcesses:
    """As many processes as compile at the same time, and a thread for each that hands it one kernel after another.

    Args:
        number: Of the processes.
    """

    def __init__(self, number: int) -> None:
        pairs = [socket.socketpair() for _ in range(number)]
        theirs = [their.fileno() for _, their in pairs]
        try:
            # Not by multiprocessing, which would import the user's main module. In a session of its own: Ctrl-C is
            # this process's to hear.
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
        """Of the process whose children compile."""
        return self._process.pid

    def submit(
        self, function: JITFunction[Any], specialization: str, target: dict[str, Any], *, deferred: bool = False
    ) -> Future[bool]:
        """Have one of a function's specialisations compiled, if it is not on disk.

        Args:
            function: Triton's, at the top of one of our modules.
            specialization: As Triton writes it down.
            target: The fields of Triton's `GPUTarget`.
            deferred: Whether it comes after all others, and not before `release`.

        Returns:
            Whether it is on disk then.
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
        """What is urgent has been asked for: what is deferred may follow."""
        with self._changed:
            self._may_begin_deferred = True
            self._changed.notify_all()

    def finish(self) -> None:
        """Nobody will ask for more: let the processes end when all is done."""
        with self._changed:
            self._ending = self._may_begin_deferred = True
            self._changed.notify_all()

    def close(self) -> None:
        """Let the processes end, whatever they are at; return when they are gone. What they began, ptxas for example,
        is over soon."""
        self.finish()
        self._fail_pending()
        for channel in self._channels:
            _shut_down(channel)
        self._process.terminate()
        for each in self._threads:
            each.join()

    def _kill(self) -> None:
        """All processes and what they have begun, compilers of C for example; they have a session of their own."""
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _feed_worker(self, channel: socket.socket) -> None:
        """Give one process the most urgent job, one after another, until none is left."""
        with channel:
            while (job := self._next_job()) is not None:
                try:
                    error = _request(channel, job.request)
                except Exception as gone:  # whatever it is, nobody shall wait for the job for ever
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
        """The most urgent job, once there is one; None if there will be none."""

        def is_there() -> bool:
            return bool(self._jobs) and (self._may_begin_deferred or not self._jobs[0].deferred)

        with self._changed:
            self._changed.wait_for(lambda: is_there() or (self._ending and not self._jobs))
            if thread._shutdown:  # the interpreter ends, and would wait for all that is left
                self._fail_pending()
            return heapq.heappop(self._jobs) if self._jobs else None

    def _fail_pending(self) -> None:
        """Answer all jobs that have not begun with False: whoever waits for one compiles it himself."""
        with self._changed:
            jobs, self._jobs = self._jobs, []
        for job in jobs:
            job.done.set_result(False)

    def _wait_or_kill(self) -> None:
        """Wait for the parent of the compiling processes to end; kill all of them if it takes too long."""
        try:
            self._process.wait(_LEAVING_S)
        except subprocess.TimeoutExpired:
            self._kill()
            self._process.wait()


def _shut_down(channel: socket.socket) -> None:
    """End the connection for the other end too, even if a child of this process holds this end open."""
    with suppress(OSError):  # it is closed already
        channel.shutdown(socket.SHUT_RDWR)


def _request(channel: socket.socket, request: dict[str, Any]) -> str:
    """The process's answer: what went wrong, if anything did."""
    channel.sendall(json.dumps(request).encode() + b"\n")
    answer = b""
    while not answer.endswith(b"\n"):
        if not (part := channel.recv(1 << 16)):
            raise ConnectionResetError("it has closed its socket")
        answer += part
    error: str = json.loads(answer)["error"]
    return error
