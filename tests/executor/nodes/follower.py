"""Nodes of one engine on this machine: the head in this process or a server, the others as `quire serve --headless`."""

from __future__ import annotations

import itertools
import os
import socket
from contextlib import suppress
from typing import Any

from tests.e2e.serve import QuireServe

KEY = "a key that all nodes have"
_PORTS, _SMALLEST_PORT = 12_000, 20_000
_numbers = itertools.count(37 * os.getpid())


def free_port() -> int:
    """A port at which nobody listens, and that no other program gets before the head listens there: the kernel chooses
    larger ones."""
    for number in _numbers:
        port = _SMALLEST_PORT + number % _PORTS
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("numbers do not end")


class Follower(QuireServe):
    """A node that is not the head; a context that ends it.

    Args:
        node: Its number.
        port: Of the head.
        flags: More of them.
        key: QUIRE_NODE_KEY.
        environment: More variables.
    """

    def __init__(self, node: int, port: int, *flags: str, key: str = KEY, **environment: Any) -> None:
        at = ("--node-rank", str(node), "--headless", "--master-port", str(port))
        super().__init__(*at, *flags, environment={"QUIRE_NODE_KEY": key, **environment})
