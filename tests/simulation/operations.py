"""What an operator does: pauses the engine for a while, resets its prefix cache, asks for its counts."""

from __future__ import annotations

from collections.abc import Callable

from quire.errors import QuireError
from tests.simulation.api_process import SimulatedApi
from tests.simulation.judge import Excuses
from tests.simulation.server import Server
from tests.simulation.settings import Settings

ACTIONS = ("reset_prefix_cache", "counts", "is_paused", "pause:keep", "pause:wait", "pause:abort")
AGAIN_S = 0.2
"""When a command that failed is given again."""


class Operator:
    """Gives commands now and then.

    Args:
        server: Gets them.
        settings: Of the run.
        excuses: What they explain.

    Attributes:
        paused: Whether a pause was commanded, and no resume has succeeded since.
    """

    def __init__(self, server: Server, settings: Settings, excuses: Excuses) -> None:
        self._server = server
        self._world = server.world
        self._excuses = excuses
        self._rng = server.world.random("operator")
        self._stopped = "pauses" not in settings.features
        self.paused = False
        self._next()

    def stop(self) -> None:
        """No more pauses; one that lasts is ended as planned."""
        self._stopped = True

    def _next(self) -> None:
        if not self._stopped:
            self._world.after(self._rng.expovariate(1.0), self._act)

    def _act(self) -> None:
        if self._stopped:
            return
        action = self._rng.choice(
            ("reset_prefix_cache", "counts", "is_paused", "pause:keep", "pause:wait", "pause:abort")
        )
        if self._server.is_up and not self.paused:
            self._world.say(f"operator: {action}")
            if action.startswith("pause"):
                self._pause(action)
            else:
                self._command(action, lambda succeeded: None)
        self._next()

    def _pause(self, action: str) -> None:
        self.paused = True
        if action == "pause:abort":
            self._excuses.aborts.append(float("inf"))
        place = len(self._excuses.aborts) - 1

        def reached(succeeded: bool) -> None:
            if action == "pause:abort":
                self._excuses.aborts[place] = self._world.now()

        self._command(action, reached)
        self._world.after(self._rng.uniform(0.01, 1.0), self._resume)

    def _resume(self) -> None:
        def resumed(succeeded: bool) -> None:
            self._server.disturbed()
            if succeeded:
                self.paused = False
            else:
                self._world.after(AGAIN_S, self._resume)

        self._command("resume", resumed)

    def _command(self, action: str, done: Callable[[bool], None]) -> None:
        """Give a command; `done` is told whether it succeeded, once, whatever becomes of the API process."""
        api = self._server.api
        if not api.serves:
            self._world.after(0.0, lambda: done(False))
            return
        api.loop.call_soon(lambda: api.loop.create_task(_give(api, action, done)))


async def _give(api: SimulatedApi, action: str, done: Callable[[bool], None]) -> None:
    succeeded = False
    try:
        succeeded = not (await api.session.control(action)).error
    except QuireError:
        pass
    finally:
        done(succeeded)
