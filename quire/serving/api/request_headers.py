"""One header of a request, without building an object of all of them: middleware looks at a few of each request."""

from __future__ import annotations

from starlette.types import Scope


def request_header(scope: Scope, name: bytes) -> str | None:
    """The first header of this name, which is given in lower case; None without one."""
    for key, value in scope["headers"]:
        if key == name:
            text: str = value.decode("latin-1")
            return text
    return None
