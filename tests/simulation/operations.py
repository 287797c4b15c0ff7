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
        action = self._rng.choice(ACTIONS)
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
            if action == "pause:abort":  # without an answer it may still be on its way
                self._excuses.aborts[place] = self._world.now() + (0.0 if succeeded else 1.0)

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
        """Give a command; `done` is told once whether it succeeded, whatever becomes of the API process."""
        command = _Command(self._server.api, action, done)
        if command.api.serves:
            command.api.loop.call_soon(lambda: command.api.loop.create_task(command.give()))
        self._await(command)

    def _await(self, command: _Command) -> None:
        if not command.api.serves:
            command.end(False)
        elif not command.ended:
            self._world.after(AGAIN_S, lambda: self._await(command))


class _Command:
    """One command to one API process."""

    def __init__(self, api: SimulatedApi, action: str, done: Callable[[bool], None]) -> None:
        self.api = api
        self.ended = False
        self._action = action
        self._done = done

    async def give(self) -> None:
        """Wait for its answer, in the event loop."""
        try:
            answer = await self.api.session.control(self._action)
            self.end(not answer.error)
        except QuireError:
            self.end(False)

    def end(self, succeeded: bool) -> None:
        """It has an answer, or will have none."""
        if not self.ended:
            self.ended = True
            self._done(succeeded)
