"""One client's request from its arrival to its end: what is known of it, for the log and the metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from starlette.types import Scope

from quire.serving.api.request_record import write_line
from quire.serving.api.request_work import CLIENT_CLOSED_REQUEST
from quire.serving.router.backend_list import KeyLimits

_MILLISECONDS = 3


@dataclass
class Exchange:
    """What is known of a request so far.

    Attributes:
        began: Monotonic seconds.
        key: Whose request it is; None without keys.
        model: The model's name, if a server has it.
        backend: URL of the server that answers.
        status: What the client was sent; until then, that the client went away.
        started: Whether an answer has begun.
        first_byte_s: From arrival to the first byte of a server's answer.
        requests_left: How many more its key may send at once; None for any number.
    """

    began: float
    key: KeyLimits | None = None
    model: str = ""
    backend: str = ""
    status: int = CLIENT_CLOSED_REQUEST
    started: bool = False
    first_byte_s: float | None = None
    requests_left: int | None = None

    @property
    def key_name(self) -> str:
        """The name of the key; empty without keys."""
        return self.key.name if self.key else ""

    def log(self, scope: Scope, now: float) -> None:
        """Write a line of the access log."""
        client = scope.get("client")
        fields: dict[str, Any] = {
            "client": f"{client[0]}:{client[1]}" if client else "-",
            "method": scope["method"],
            "path": scope["raw_path"].decode("ascii", "backslashreplace"),
            "status": self.status,
            "request_id": scope["state"]["request_id"],
            "duration_s": round(now - self.began, _MILLISECONDS),
        }
        if self.first_byte_s is not None:
            fields["first_byte_s"] = round(self.first_byte_s, _MILLISECONDS)
        rest = {"key": self.key_name, "model": self.model, "backend": self.backend}
        write_line(fields | {name: value for name, value in rest.items() if value}, scope["http_version"])
