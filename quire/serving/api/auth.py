"""Auth: who sends a request, by its API key; and what else its head tells before its body is read: id and deadline.

Every route needs a key, except a short list of public routes. The decision uses the route that the router itself
matches, so no header and no spelling of a path gets around it. Only digests of keys are kept.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.errors import AuthenticationError, RequestError
from quire.foundation.clock import Clock
from quire.foundation.config import ServerConfig
from quire.serving.api.error_responses import error_response
from quire.serving.api.request_record import RECORD
from quire.serving.api.session.output_collector import OutputCollector

HEADER = "X-Request-Id"
_ID_NAME = HEADER.lower().encode()
_RANDOM_BYTES = 16
_VALID_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
PUBLIC = frozenset({
    "/",
    "/health",
    "/ready",
    "/ping",
    "/version",
    "/load",
    "/metrics",
    "/docs",
    "/docs/files/{name}",
    "/page/{version}/{name:path}",
    "/redoc",
    "/openapi.json",
})  # fmt: skip
TIMEOUT_HEADER = "X-Request-Timeout"
DIRECT_SEND = "direct_send"
"""Key in the scope's state: the server's own `send`, for bodies that come in many parts. Middleware wraps `send` to see
how a response begins; to pass each part of its body through all of them would cost as much as making it."""
TENANT = "tenant"
"""Key in the scope's state of a request that the server sends to itself: in whose name."""
_TIMEOUT_NAME = TIMEOUT_HEADER.lower().encode()
_RETRIES_NAME = b"x-stainless-retry-count"
_TENANT_DIGITS = 16


def request_header(scope: Scope, name: bytes) -> str | None:
    """The first header of this name, which is given in lower case; None without one."""
    for header, value in scope["headers"]:
        if header == name:
            text: str = value.decode("latin-1")
            return text
    return None


class RequestIdMiddleware:
    """ASGI middleware, the outermost: sets `scope["state"]["request_id"]`, and the header of the response if there was
    one. Bodies in many parts are sent directly, unless other middleware wants to see them."""

    def __init__(self, app: ASGIApp, *, always_answer: bool, sends_directly: bool = True) -> None:
        self._app = app
        self._always = always_answer
        self._sends_directly = sends_directly

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = request_header(scope, _ID_NAME) or ""
        own = _VALID_ID.fullmatch(given) is not None
        state = scope.setdefault("state", {})
        if self._sends_directly:
            state[DIRECT_SEND] = send
        state["request_id"] = given if own else secrets.token_hex(_RANDOM_BYTES)

        async def with_header(message: Message) -> None:
            if message["type"] == "http.response.start" and (own or self._always):
                MutableHeaders(scope=message)[HEADER] = state["request_id"]
            await send(message)

        await self._app(scope, receive, with_header)


def use_request_id(request: Request, given: str | None) -> None:
    """Take the body's `request_id`, unless the header has one; raises RequestError if it is no valid id."""
    if given is None:
        return
    if not _VALID_ID.fullmatch(given):
        raise RequestError("request_id must have 1 to 128 letters, digits or characters of '._:-'.", param="request_id")
    if not _VALID_ID.fullmatch(request.headers.get(HEADER, "")):
        request.state.request_id = given


def key_in(headers: Headers) -> str:
    """The key of a request; empty without one."""
    return given_key(headers.get("authorization"), headers.get("x-api-key"))


def given_key(authorization: str | None, x_api_key: str | None) -> str:
    """The key in the headers of these names. Anthropic's clients send it in the second."""
    if authorization is None:
        return (x_api_key or "").strip()
    scheme, _, key = authorization.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def digest_of(key: str) -> bytes:
    """SHA-256, which is all that is kept of a key."""
    return hashlib.sha256(key.encode()).digest()


def find_digest(digest: bytes, known: Sequence[bytes]) -> int | None:
    """The place of a digest among the known ones, or None. Takes as long whichever it is."""
    found = None
    for place, other in enumerate(known):  # all of them: the time must not depend on which one is similar
        if hmac.compare_digest(other, digest):
            found = place
    return found


def is_retry(scope: Scope) -> bool:
    """Whether a client of OpenAI's or Anthropic's sends a request again, as it says in a header."""
    return (request_header(scope, _RETRIES_NAME) or "0") != "0"


@dataclass(frozen=True)
class Caller:
    """Who sent an HTTP request, and when it has to be answered.

    Attributes:
        tenant: A digest of its API key and of the tenant header; empty without both.
        arrival: When the request arrived, in monotonic seconds.
        deadline: When it has to be answered, in monotonic seconds; None for no deadline.
        collectors: Gets a collector for what the request handed to the engine; None if nobody needs it.
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
    """The seconds that a request may take; raises a RequestError about `name` if they are not above 0."""
    if not (seconds > 0 and math.isfinite(seconds)):
        raise RequestError(f"{name} must be seconds above 0, got {seconds:g}.", param=name)
    return seconds


class CallerMiddleware:
    """ASGI middleware that answers 401 without a valid key, if there are any keys, and sets
    `scope["state"]["caller"]`."""

    def __init__(self, app: ASGIApp, *, config: ServerConfig, routes: Sequence[BaseRoute], clock: Clock) -> None:
        self._app = app
        self._digests = [digest_of(key) for key in config.api_key]
        self._routes = routes
        self._tenant_name = (config.tenant_header or "").lower().encode()
        self._max_timeout = config.max_request_timeout
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        key = self._valid_key(scope)
        if self._digests and not key and not self._is_public(scope):
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
                return
            error = AuthenticationError("A valid API key is needed: send it as the header 'Authorization: Bearer KEY'.")
            await error_response(error)(scope, receive, send)
            return
        if scope["type"] == "http":
            try:
                scope["state"]["caller"] = self._caller(scope, key)
            except RequestError as error:
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _valid_key(self, scope: Scope) -> bytes:
        """The digest of the key that a request brought; empty if the key is unknown."""
        if not self._digests:
            return b""
        key = given_key(request_header(scope, b"authorization"), request_header(scope, b"x-api-key"))
        digest = digest_of(key)
        return digest if key and find_digest(digest, self._digests) is not None else b""

    def _is_public(self, scope: Scope) -> bool:
        for route in self._routes:
            match, _ = route.matches(scope)
            if match is Match.FULL:
                return getattr(route, "path", None) in PUBLIC
        return False

    def _caller(self, scope: Scope, key: bytes) -> Caller:
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
        both = key + name.encode()  # the digest reveals neither
        tenant = hashlib.sha256(both).hexdigest()[:_TENANT_DIGITS] if both else ""
        return Caller(tenant, arrival, deadline, collectors)


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise RequestError(f"{TIMEOUT_HEADER} must be a number of seconds.", param=TIMEOUT_HEADER) from None
