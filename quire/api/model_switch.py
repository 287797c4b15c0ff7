"""The ASGI application of this process: hands each request to the application of the model that is served."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from quire.api.served_model import ServedModel
from quire.messages import Ready


class ModelSwitch:
    """Connections are this process's, requests a model's.

    Args:
        first: The model that is served from the start.

    Attributes:
        current: Where new requests go.
    """

    def __init__(self, first: ServedModel) -> None:
        self.current = first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app: ASGIApp = self.current.app if scope["type"] != "lifespan" else self._live
        await app(scope, receive, send)

    # --- life, as `serve_until_end` leads it ------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to receive; called in the event loop. More calls do nothing."""
        self.current.session.start()

    async def wait_ready(self) -> Ready:
        """What the engines can do, see EngineSession.

        Raises:
            EngineDeadError: One died instead.
        """
        return await self.current.session.wait_ready()

    async def wait_dead(self) -> None:
        """Until the engine of the served model is dead and is not replaced."""
        await self.current.session.wait_dead()

    async def drain(self, timeout: float) -> bool:
        """Wait until open requests have ended, see EngineSession."""
        return await self.current.session.drain(timeout)

    @property
    def num_sequences(self) -> int:
        """Sequences that have not ended."""
        return self.current.session.num_sequences

    async def _live(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The lifespan protocol: from the server's start to its end."""
        await receive()
        await self.current.open()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self.current.close()
        await send({"type": "lifespan.shutdown.complete"})
