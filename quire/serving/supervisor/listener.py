"""The listening socket: bound before any child starts, so that a taken port is said at once."""

from __future__ import annotations

import errno
import socket

from quire.errors import AddressInUseError, ConfigError, reason
from quire.foundation.config import ServerConfig

BACKLOG = 2048


def listen(server: ServerConfig) -> socket.socket:
    """A bound, listening socket on the server's host (by default all interfaces) and port. Raises AddressInUseError if
    something listens there already, and ConfigError if this machine does not have the address."""
    if not 0 <= server.port < 65536:
        raise ConfigError(f"--port must be between 0 and 65535, got {server.port}.", param="port")
    host = server.host or "0.0.0.0"
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, server.port))
    except (OSError, UnicodeError) as error:
        listener.close()
        code = getattr(error, "errno", None)
        if code == errno.EADDRINUSE:
            raise AddressInUseError(
                f"Port {server.port} is taken by another program: choose one with --port, or 0 for any free one."
            ) from error
        if code == errno.EACCES:
            raise AddressInUseError(f"Port {server.port} needs privileges: choose one above 1023.") from error
        raise ConfigError(f"Cannot listen on --host {host}: {_why(error)}.", param="host") from error
    listener.listen(BACKLOG)
    return listener


def _why(error: Exception) -> str:
    if isinstance(error, socket.gaierror | UnicodeError):
        return "this name is not known here; leave --host out to listen on every address"
    if isinstance(error, OSError) and error.errno == errno.EADDRNOTAVAIL:
        return "this machine has no such address; leave --host out to listen on all that it has"
    return reason(error)
