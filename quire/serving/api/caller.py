"""Who sent a request, when it arrived, and when it has to be answered: known before its body is read."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

from starlette.types import ASGIApp, Receive, Scope, Send

from quire.errors import RequestError
from quire.foundation.clock import Clock
from quire.foundation.config import ServerConfig
from quire.serving.api.error_responses import error_response
from quire.serving.api.request_headers import request_header
from quire.serving.api.request_record import RECORD
from quire.serving.api.session.open_requests import OutputCollector

TIMEOUT_HEADER = "X-Request-Timeout"
API_KEY = "api_key"
"""Key in the scope's state: the digest of the API key that a request brought, see AuthenticationMiddleware."""
TENANT = "tenant"
"""Key in the scope's state of a request that the server sends to itself: in whose name."""
_TIMEOUT_NAME = TIMEOUT_HEADER.lower().encode()
_TENANT_DIGITS = 16


@dataclass(frozen=True)
class Caller:
    """Who sent an HTTP request, and when it has to be answered.

    Attributes:
        tenant: Whose it is: a digest of its API key and of the tenant header, if there are any.
        arrival: When the request arrived, in monotonic seconds.
        deadline: When it has to be answered, in monotonic seconds; None: it has no deadline.
        collectors: Gets a collector for what the request handed to the engine; None: nobody needs it.
    """

    tenant: str = ""
    arrival: float = 0.0
    deadline: float | None = None
    collectors: list[OutputCollector] | None = None

    def deadline_after(self, timeout: float | None) -> float | None:
        """The deadline, or `timeout` seconds after the arrival if that is earlier."""
        if timeout is None:
            return self.deadline
        later = self.arrival + timeout
        return later if self.deadline is None else min(self.deadline, later)


ANYBODY = Caller()


def check_timeout(name: str, seconds: float) -> float:
    """Seconds that a request may take.

    Raises:
        RequestError: It is not above 0; the error names the field or header.
    """
    if not (seconds > 0 and math.isfinite(seconds)):
        raise RequestError(f"{name} must be seconds above 0, got {seconds:g}.", param=name)
    return seconds


class CallerMiddleware:
    """ASGI middleware that sets `scope["state"]["caller"]`.

    Args:
        app: What runs inside.
        config: Names the tenant header and the longest time.
        clock: For arrivals and deadlines.
    """

    def __init__(self, app: ASGIApp, *, config: ServerConfig, clock: Clock) -> None:
        self._app = app
        self._tenant_name = (config.tenant_header or "").lower().encode()
        self._max_timeout = config.max_request_timeout
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                scope["state"]["caller"] = self._caller(scope)
            except RequestError as error:
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _caller(self, scope: Scope) -> Caller:
        arrival, given = self._clock.now(), request_header(scope, _TIMEOUT_NAME)
        timeouts = [] if self._max_timeout is None else [self._max_timeout]
        if given is not None:
            timeouts.append(check_timeout(TIMEOUT_HEADER, _seconds(given)))
        deadline = arrival + min(timeouts) if timeouts else None
        record = scope["state"].get(RECORD)
        collectors = None if record is None else record.collectors
        if TENANT in scope["state"]:
            return Caller(scope["state"][TENANT], arrival, deadline, collectors)
        name = (request_header(scope, self._tenant_name) or "") if self._tenant_name else ""
        return Caller(_tenant(scope["state"].get(API_KEY, b""), name), arrival, deadline, collectors)


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise RequestError(f"{TIMEOUT_HEADER} must be a number of seconds.", param=TIMEOUT_HEADER) from None


def _tenant(key: bytes, name: str) -> str:
    """Digest an API key and a tenant name into an id that reveals neither; empty if both are empty."""
    return hashlib.sha256(key + name.encode()).hexdigest()[:_TENANT_DIGITS] if key or name else ""
