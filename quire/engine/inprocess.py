"""An engine in this process: `receive` runs its loop. For `LLM`, and for tests of everything above.

`receive` is called from one thread at a time, `send` and `end` from any.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
import weakref
from collections import deque
from collections.abc import Callable
from types import FrameType

from quire.engine.adapter_registry import load_modules
from quire.engine.build import ModelRuntimeInfo
from quire.engine.core import EngineCore
from quire.engine.port import Undecodable
from quire.engine.token_bitmasks import TokenBitmaskSource
from quire.errors import EngineDeadError
from quire.foundation.clock import Clock, SystemClock
from quire.foundation.config import Config
from quire.foundation.messages.from_engine import EngineId, FromEngine, Heartbeat
from quire.foundation.messages.to_engine import Control, ToEngine
from quire.runtime.executor.executor import Executor

Handler = Callable[[int, FrameType | None], object]


class InterruptGuard:
    """A context around each change of state: a SIGINT inside is delivered on leaving it, a second one at once.

    Signal handlers run between any two bytecodes of the main thread, so a KeyboardInterrupt could leave behind a plan
    that was never submitted, or a result that is half processed. Works between `install` and `uninstall`, in the main
    thread: Python runs signal handlers in no other one.
    """

    def __init__(self) -> None:
        self._previous: Handler | None = None
        self._guarding = False
        self._pending = False

    def install(self) -> None:
        """Replace the process's handler for SIGINT, unless that is not a Python function."""
        if threading.current_thread() is threading.main_thread():
            current = signal.getsignal(signal.SIGINT)
            if callable(current) and current != self._on_signal:
                self._previous = current
                signal.signal(signal.SIGINT, self._on_signal)

    def uninstall(self) -> None:
        """Restore the former handler, unless another was set meanwhile."""
        if self._previous is None or threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGINT) == self._on_signal:
            signal.signal(signal.SIGINT, self._previous)

    def __enter__(self) -> None:
        self._pending = False
        self._guarding = True

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._guarding = False
        if self._pending and kind is None:
            signal.raise_signal(signal.SIGINT)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._guarding and not self._pending:
            self._pending = True
        elif self._previous is not None:
            self._previous(number, frame)


class _QueuePort:
    """Messages in by a thread-safe queue, out by a plain one."""

    def __init__(self) -> None:
        self.inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
        self.outbox: deque[FromEngine] = deque()

    def drain(self, wait: float | None) -> list[ToEngine | Undecodable]:
        messages: list[ToEngine | Undecodable] = []
        try:
            messages.append(self.inbox.get(block=wait != 0.0, timeout=wait or None))
            while True:
                messages.append(self.inbox.get_nowait())
        except queue.Empty:
            return messages

    def send(self, client: int, message: FromEngine) -> None:
        self.outbox.append(message)

    def forget(self, client: int) -> None:
        pass  # there is one client, and it lives as long as the engine


class InProcessClient:
    """EngineClient number 0 of an engine of its own; arguments as of EngineCore, with an executor that is not started.

    Attributes:
        interrupts: Keeps Ctrl-C from breaking a turn of the loop, where it is installed.
        ended: Why nothing is received any more; empty while something is.

    Raises:
        SetupError: The model cannot be served.
    """

    def __init__(
        self,
        config: Config,
        executor: Executor,
        clock: Clock | None = None,
        runtime_info: ModelRuntimeInfo | None = None,
        masker: TokenBitmaskSource | None = None,
    ) -> None:
        self.number = 0
        self.engine = EngineId()
        self._clock = clock or SystemClock()
        self._port = _QueuePort()
        device_limits = executor.start()
        adapters = load_modules(config.lora, executor.orders)
        info = runtime_info or ModelRuntimeInfo()
        self._core = EngineCore(config, device_limits, info, executor, self._port, self._clock, masker, None, adapters)
        # A worker's thread that outlives the interpreter ends the process by SIGABRT.
        self._close = weakref.finalize(self, _close, os.getpid(), executor, masker)
        self._failure = ""  # of a turn
        self.ended = ""
        self.interrupts = InterruptGuard()
        self._port.outbox.append(self._core.ready)

    def counts(self) -> dict[str, int]:
        """What the engine holds, for leak tests."""
        return self._core.counts()

    def heartbeat(self) -> Heartbeat:
        """The heartbeat that the engine would send next."""
        return self._core.heartbeat()

    def send(self, message: ToEngine) -> None:
        self._port.inbox.put(message)

    def connect(self, engine: EngineId) -> None:
        raise AssertionError("an engine in this process is not replaced")

    def receive(self, timeout: float | None) -> FromEngine | None:
        """The next message; runs the loop until there is one. Raises what a step raised, and later EngineDeadError."""
        deadline = None if timeout is None else self._clock.now() + timeout
        while self.ended or not self._port.outbox:
            if self.ended:
                raise EngineDeadError(self.ended)
            left = None if deadline is None else max(0.0, deadline - self._clock.now())
            self._turn(left)
            if not self._port.outbox and left == 0.0:
                return None
        return self._port.outbox.popleft()

    def _turn(self, wait: float | None) -> None:
        if self._failure:
            raise EngineDeadError(f"The engine stopped in the middle of a step ({self._failure}). Create a new LLM.")
        with self.interrupts:
            try:
                self._core.turn(wait)
            except BaseException as error:  # what the turn left half done cannot be relied on
                self._failure = f"{type(error).__name__}: {error}".removesuffix(": ")
                raise

    def end(self, why: str) -> None:
        """Let every `receive`, now or later, raise an EngineDeadError that says why."""
        self.ended = self.ended or why
        self._port.inbox.put(Control(0, "counts"))  # wakes the loop

    def close(self) -> None:
        self._close()  # once; else when this object is collected, or the process exits


def _close(process: int, executor: Executor, masker: TokenBitmaskSource | None) -> None:
    if os.getpid() != process:
        return  # a fork has a copy of the object: neither threads nor ranks are its own
    if masker is not None:
        masker.close()
    executor.close()
