"""Ctrl-C while the engine's state changes: deferred until it is consistent again.

Signal handlers run between any two bytecodes of the main thread, so a KeyboardInterrupt could leave behind a plan that
was never submitted, or a result that is half processed.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType

Handler = Callable[[int, FrameType | None], object]


class InterruptGuard:
    """A context around each change of state: a SIGINT inside is delivered on leaving it, a second one at once.

    Works between `install` and `uninstall`, in the main thread; Python runs signal handlers in no other one.
    """

    def __init__(self) -> None:
        self._previous: Handler | None = None
        self._guarding = False
        self._pending = False

    def install(self) -> None:
        """Take the place of the process's handler for SIGINT, unless that is not a Python function."""
        if threading.current_thread() is threading.main_thread():
            current = signal.getsignal(signal.SIGINT)
            if callable(current) and current != self._on_signal:
                self._previous = current
                signal.signal(signal.SIGINT, self._on_signal)

    def uninstall(self) -> None:
        """Restore that handler, unless another was set meanwhile."""
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
