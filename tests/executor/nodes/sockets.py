"""Two ends of a TCP connection over loopback."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The side that has connected, and the one that has accepted."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        server, _ = listener.accept()
    with client, server:
        yield client, server
