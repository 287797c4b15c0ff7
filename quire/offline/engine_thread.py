"""An engine, and the thread that loads it and runs its loop. Its messages hop to an event loop."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from quire.errors import ConfigError, EngineDeadError
from quire.foundation.messages.from_engine import FromEngine
from quire.foundation.messages.to_engine import Control
from quire.offline.local_engine import LocalEngine

CLOSED = "The engine was shut down. Create a new AsyncLLM."


class EngineThread:
    """A running engine, `local`; see LLM for model, settings and errors. In the event loop, `take` gets each message,
    and `fail` the cause when the engine is gone. Only `send` of its client may be called while it runs."""

    def __init__(
        self,
        model: str,
        settings: Mapping[str, Any],
        take: Callable[[FromEngine], None],
        fail: Callable[[Exception], None],
    ) -> None:
        self._failure: Exception | None = None
        self._process = os.getpid()
        self._take = take
        self._fail = fail
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing = False
        started: Future[LocalEngine] = Future()
        self._thread = threading.Thread(target=self._run, args=(model, settings, started), name="engine", daemon=True)
        self._thread.start()
        self.local = started.result()

    @property
    def failure(self) -> Exception | None:
        """Why there is no engine, or none in this process; None while there is one."""
        return self._failure or self.local.failure

    def attach(self, *, idle: bool) -> None:
        """Use the running event loop from now on. Raises ConfigError if something waits in the loop before (it is not
        `idle`), and EngineDeadError if there is no engine any more."""
        if (failure := self.failure) is not None:
            raise failure
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if not idle and self._loop is not None and not self._loop.is_closed():
                raise ConfigError("An AsyncLLM serves one event loop at a time.")
            self._loop = loop

    def close(self) -> None:
        """Free the engine. Further calls do nothing, nor do calls in a fork of the engine's process."""
        if self._closing or os.getpid() != self._process:
            return
        self._closing = True
        self.local.client.send(Control(0, "counts"))  # wakes the thread
        self._thread.join()
        self._stop(EngineDeadError(CLOSED))

    def _run(self, model: str, settings: Mapping[str, Any], started: Future[LocalEngine]) -> None:
        try:
            local = LocalEngine("AsyncLLM", model, settings)
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(local)
        try:
            while not self._closing:
                message = local.client.receive(None)
                if message is not None:
                    self._call(self._take, message)
        except Exception as error:
            self._stop(EngineDeadError(f"The engine stopped: {type(error).__name__}: {error}"))
        finally:
            local.close()

    def _stop(self, failure: Exception) -> None:
        """Tell that there is no engine any more. Any thread may call this."""
        self._failure = self._failure or failure
        self._call(self._fail, self._failure)

    def _call(self, function: Callable[[Any], None], value: object) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # the event loop is closed
                self._loop.call_soon_threadsafe(function, value)
