"""An asyncio event loop in virtual time: callbacks in the order in which they were called for, as in any other loop.

No sockets and no threads. Several may exist at once, one for each simulated process.
"""

from __future__ import annotations

import asyncio
import signal
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any

from tests.simulation.world import World

_LAST_ROUNDS = 50
"""How often cancelled tasks of a dead process may still go on."""


class VirtualLoop(asyncio.AbstractEventLoop):
    """The loop of one simulated process.

    Args:
        world: Gives it its time.
        name: Of the process.

    Attributes:
        held: Whether it gets no time now.
    """

    def __init__(self, world: World, name: str) -> None:
        self._world = world
        self._name = name
        self._ready: deque[asyncio.Handle] = deque()
        self._planned = self._running = self._dead = False
        self.held = False
        self._tasks: list[asyncio.Task[Any]] = []
        self._signals: dict[int, asyncio.Handle] = {}

    # --- what asyncio asks of a loop --------------------------------------------------------------------------------

    def time(self) -> float:
        return self._world.now()

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        self._plan()
        return handle

    call_soon_threadsafe = call_soon

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._world.at(when, lambda: self._timer_due(handle))
        return handle

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, Any], *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[Any]:
        task = asyncio.Task(coro, loop=self, name=name, context=context)
        self._tasks = [each for each in self._tasks if not each.done()]
        self._tasks.append(task)
        return task

    def add_signal_handler(self, sig: int, callback: Callable[..., object], *args: Any) -> None:
        self._signals[sig] = asyncio.Handle(callback, args, self)

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return self._running

    def is_closed(self) -> bool:
        return self._dead

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self._dead:
            self._world.fail(f"in {self._name}: {context.get('message')} {context.get('exception')!r}")

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass

    # --- for the process --------------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether no callback is ready to run."""
        return not self._ready

    def signalled(self, number: signal.Signals) -> bool:
        """A signal arrives; whether it is handled."""
        handler = self._signals.get(number)
        if handler is None:
            return False
        self._ready.append(handler)
        self._plan()
        return True

    def run_inside(self, action: Callable[[], None]) -> None:
        """Do something as if a callback did."""
        self._running = True
        events._set_running_loop(self)
        try:
            action()
        finally:
            events._set_running_loop(None)
            self._running = False

    def release(self) -> None:
        """It gets time again."""
        self.held = False
        if self._ready:
            self._plan()

    def kill(self) -> None:
        """Its process is dead: tasks are unwound at the next event. The process drops what they say."""
        if not self._dead:
            self._dead = True
            self._world.after(0.0, self.unwind)

    def unwind(self) -> None:
        """Cancel what runs, so that nothing is left to the garbage collector; called by the world's thread."""
        self._dead = True
        for _ in range(_LAST_ROUNDS):
            for task in self._tasks:
                task.cancel()
            self.run_inside(self._run_ready)
            if all(task.done() for task in self._tasks):
                break
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.exception()  # nobody asks for it
        self._ready.clear()

    def _timer_due(self, handle: asyncio.TimerHandle) -> None:
        if not handle.cancelled() and not self._dead:
            self._ready.append(handle)
            self._plan()

    def _plan(self) -> None:
        if not self._planned and not self._dead:
            self._planned = True
            self._world.after(0.0, self._run_once)

    def _run_once(self) -> None:
        self._planned = False
        if self.held or self._dead:
            return
        self.run_inside(self._run_ready)
        if self._ready:
            self._plan()

    def _run_ready(self) -> None:
        for _ in range(len(self._ready)):
            handle = self._ready.popleft()
            if not handle.cancelled():
                handle._run()
