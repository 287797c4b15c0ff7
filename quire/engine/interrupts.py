"""Ctrl-C while the engine's state changes: held back until it is consistent again.

Signal handlers run between any two bytecodes of the main thread, so a KeyboardInterrupt could leave a plan that was
never submitted, or a result that was half settled.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType

Handler = Callable[[int, FrameType | None], object]


class InterruptGuard:
    """A context around each change of state: a SIGINT within is delivered when it is left, a second one at once.

    Works between `install` and `uninstall`, in the main thread; elsewhere nothing is interrupted by signals.
    """

    def __init__(self) -> None:
        self._previous: Handler | None = None
        self._guarding = False
        self._pending = False

    def install(self) -> None:
        """Take the place of the process's handler for SIGINT, unless that is no function of Python."""
        if self._previous is None and threading.current_thread() is threading.main_thread():
            previous = signal.getsignal(signal.SIGINT)
            if callable(previous):
                self._previous = previous
                signal.signal(signal.SIGINT, self._on_signal)

    def uninstall(self) -> None:
        """Give its place back."""
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
            self._previous = None

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
