"""Commands to the engine that are answered once, and who waits for the answers."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping

from quire.engine.client import EngineClient
from quire.errors import QuireError
from quire.foundation.messages.from_engine import Done
from quire.foundation.messages.to_engine import CLIENT_SHIFT, Control


class EngineControls:
    """Controls that have been sent, until their Done comes."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._ids = (client.number << CLIENT_SHIFT | i for i in itertools.count(1))
        self._waiting: dict[int, asyncio.Future[Done]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    async def send(self, action: str, value: Mapping[str, str] | None = None) -> Done:
        """Send a command and wait for its answer.

        Raises:
            QuireError: There will be no answer.
        """
        number = next(self._ids)
        answer: asyncio.Future[Done] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            self._client.send(Control(number, action, dict(value or {})))
            return await answer
        finally:
            del self._waiting[number]

    def tell(self, action: str, value: Mapping[str, str] | None = None) -> None:
        """Send a command whose answer nobody waits for."""
        self._client.send(Control(next(self._ids), action, dict(value or {})))

    def on_done(self, message: Done) -> None:
        """An answer came."""
        if (answer := self._waiting.get(message.id)) and not answer.done():
            answer.set_result(message)

    def fail_all(self, error: QuireError) -> None:
        """No answer will come."""
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(error)
