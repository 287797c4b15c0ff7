"""The server's HTTP protocol, which also lets the application close a connection in the middle of an answer."""

from __future__ import annotations

from typing import Any

from quire.serving.api.http_protocol import BoundedHttpProtocol

ABORT = "quire.abort"
"""Key in the scope's extensions; holds the transport."""


class RouterHttpProtocol(BoundedHttpProtocol):
    """One client's connection."""

    def on_headers_complete(self) -> None:
        extensions: dict[str, Any] = {ABORT: {"transport": self.transport}}
        self.scope["extensions"] = extensions
        super().on_headers_complete()
