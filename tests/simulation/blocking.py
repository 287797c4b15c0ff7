"""Code that blocks, in virtual time: a thread that runs only while the world waits for it.

So at most one thread runs at any moment, and which one follows from the order of events.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from tests.simulation.world import Timer, World


class Killed(BaseException):
    """Raised in a blocking thread whose process is dead."""


class BlockingThread:
    """One thread of a simulated process.

    Args:
        world: Gives it its time.
        main: What it does; runs from the next event on.
    """

    def __init__(self, world: World, main: Callable[[], None]) -> None:
        self._world = world
        self._main = main
        self._go, self._back = threading.Lock(), threading.Lock()
        self._go.acquire()
        self._back.acquire()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._started = self._over = self._killed = False
        self._held = self._due = False
        self._waiting = True
        self._timer: Timer | None = None
        self.wake()

    # --- for the thread itself --------------------------------------------------------------------------------------

    def wait(self, timeout: float | None) -> None:
        """Return when `wake` is called, or after so many virtual seconds (None: never)."""
        if self._killed:
            raise Killed
        self._waiting = True
        self._timer = None if timeout is None else self._world.after(timeout, self._resume)
        self._back.release()
        self._go.acquire()
        if self._killed:
            raise Killed

    def sleep(self, seconds: float) -> None:
        """Take so much time, whoever calls `wake` meanwhile."""
        deadline = self._world.now() + seconds
        while (left := deadline - self._world.now()) > 0:
            self.wait(left)

    # --- for everybody else -----------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Let a waiting thread go on."""
        if self._waiting and not self._over:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._world.after(0.0, self._resume)

    def hold(self) -> None:
        """It gets no time from now on."""
        self._held = True

    def release(self) -> None:
        """It gets time again."""
        self._held = False
        if self._due:
            self._due = False
            self._world.after(0.0, self._resume)

    def kill(self) -> None:
        """It does nothing any more; its stack is unwound at the next event. Its process drops what it says then."""
        if not self._killed:
            self._killed = True
            self._world.after(0.0, self.unwind)

    def unwind(self) -> None:
        """End a killed thread; called by the world's thread."""
        self._killed = True
        if self._started and not self._over:
            self._switch()
        self._over = True

    def _resume(self) -> None:
        if self._over or self._killed:
            return
        if self._held:
            self._due = True
            return
        if not self._waiting:
            return
        self._switch()

    def _switch(self) -> None:
        """Run it until it waits again, or is over."""
        self._waiting = False
        if self._started:
            self._go.release()
        else:
            self._started = True
            self._thread.start()
        self._back.acquire()

    def _run(self) -> None:
        try:
            self._main()
        except Killed:
            pass
        finally:
            self._over = True
            self._back.release()
