"""The router's ASGI application: who may ask, which paths are served, and the answer to the client.

Answers pass as they come, as fast as the client reads. If an answer that has begun cannot be ended, the client's
connection is closed in the middle, so that the client does not take a part for the whole answer.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from quire.errors import AuthenticationError, NotFoundError, OverloadedError, QuireError, RequestError, UnavailableError
from quire.foundation.clock import Clock
from quire.foundation.config.router import RouterConfig
from quire.foundation.http_client.http1 import HttpError
from quire.serving.api.auth import HEADER, digest_of, find_digest, key_in
from quire.serving.api.error_responses import ErrorMiddleware, error_response, internal_error_body, json_answer
from quire.serving.api.http_server import BoundedHttpProtocol
from quire.serving.api.middleware import BodyLimitMiddleware
from quire.serving.api.request_record import UNCOUNTED
from quire.serving.api.request_work import run_until_disconnect
from quire.serving.router.backend_list import KeyLimits, RateLimiter
from quire.serving.router.dispatch import Answer, Dispatcher
from quire.serving.router.fleet import Fleet
from quire.serving.router.pages import Pages, is_public
from quire.serving.router.routed_request import (
    Exchange,
    RoutedRequest,
    prefix_blocks,
    read_fields,
    request_headers,
    session_blocks,
    without_hops,
)
from quire.serving.router.router_metrics import RouterMetrics

logger = logging.getLogger(__name__)

SLOW_CLIENT_S = 30.0
_ABORT = "quire.abort"
"""Key in the scope's extensions, for the transport."""
BODY_S = 120.0
"""How long a client may take to send its request's body."""
SERVED = frozenset({
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/v1/rerank",
    "/v1/score", "/v1/chat/completions/batch", "/v1/chat/completions/render", "/v1/completions/render",
    "/v1/messages/count_tokens", "/v1/responses/input_tokens", "/v2/rerank", "/rerank", "/score", "/classify",
    "/pooling", "/tokenize", "/detokenize", "/inference/v1/generate", "/invocations", "/generate", "/api/chat",
    "/api/generate", "/api/embed", "/api/embeddings", "/v2/embed", "/v1/decisions",
})  # fmt: skip
"""POSTs that go on to a server: those that compute something for a model. What operates a server, or is kept on the
disk of one, is not reached through the router."""
_EXCHANGE = "exchange"
"""Key in the scope's state: the Exchange."""


class AnswerCutOff(Exception):
    """An answer that has begun cannot be ended: the client has to see its connection close in the middle."""


async def send_answer(answer: Answer, headers: list[tuple[bytes, bytes]], send: Send, slow_client_s: float) -> None:
    """Send an answer to a client that may leave a part unread for `slow_client_s`. Raises AnswerCutOff if it breaks
    off."""
    await send({"type": "http.response.start", "status": answer.head.status, "headers": headers})
    data = answer.first
    while data:
        try:
            async with asyncio.timeout(slow_client_s):
                await send({"type": "http.response.body", "body": data, "more_body": True})
        except TimeoutError:
            raise AnswerCutOff("The client does not read.") from None
        try:
            data = await answer.read()
        except HttpError as error:
            raise AnswerCutOff(f"Server {answer.backend.address.url} failed: {error}") from error
    await send({"type": "http.response.body", "body": b""})


class RouterHttpProtocol(BoundedHttpProtocol):
    """One client's connection, which `abort` can close."""

    def on_headers_complete(self) -> None:
        extensions: dict[str, Any] = {_ABORT: {"transport": self.transport}}
        self.scope["extensions"] = extensions
        super().on_headers_complete()


async def abort(scope: Scope) -> None:
    """Close the client's connection at once."""
    scope["extensions"][_ABORT]["transport"].abort()
    await asyncio.sleep(0)  # until the HTTP server has noticed


class RouterApp:
    """The application, which records what passes in `metrics`. If there are `keys`, clients need one. `limiter` counts
    what each key sends, and `num_open` is the number of requests that servers are working on."""

    def __init__(self, fleet: Fleet, config: RouterConfig, metrics: RouterMetrics, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._metrics = metrics
        self._dispatcher = Dispatcher(fleet, config, metrics, clock)
        self._pages = Pages(fleet, metrics)
        self._bounded_post = BodyLimitMiddleware(self._post, max_bytes=config.max_request_bytes)
        self.keys: tuple[KeyLimits, ...] = ()
        self.limiter = RateLimiter(clock)
        self.num_open = 0

    def drain(self) -> None:
        """Take no more requests; open ones go on."""
        self._pages.draining = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        exchange = Exchange(self._clock.now())
        scope["state"][_EXCHANGE] = exchange
        try:
            await self._answer(scope, receive, send)
        except AnswerCutOff as error:
            logger.warning("Request %s was cut off: %s", scope["state"]["request_id"], error)
            await abort(scope)
        except QuireError as error:
            exchange.status = error.status
            await ErrorMiddleware(error_response(error))(scope, receive, send)
        except Exception:
            request_id = scope["state"]["request_id"]
            logger.exception("Request %s failed.", request_id)
            if exchange.started:
                await abort(scope)
            else:
                exchange.status = 500
                await json_answer(500, internal_error_body(request_id), {})(scope, receive, send)
        finally:
            self._note_end(scope, exchange)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request. Raises QuireError if it is not answered, and AnswerCutOff if its answer cannot be ended."""
        exchange: Exchange = scope["state"][_EXCHANGE]
        path, method = scope["path"], scope["method"]
        if self.keys and not is_public(path):
            exchange.key = self._key(scope)
        if method in ("GET", "HEAD") and self._pages.has(path):
            page = self._pages.answer(path)
            exchange.status = page.status_code
            await page(scope, receive, send)
            return
        if method != "POST" or path not in SERVED:
            raise NotFoundError(
                f"The router does not serve {method} {path[:200]}: it passes on what servers compute. Files, batches, "
                "stored responses and what operates a server are reached at the server itself."
            )
        if self._pages.draining:
            raise UnavailableError("The router is shutting down. Send the request again: another one will take it.")
        if exchange.key is not None:
            self._begin(exchange, exchange.key)
        self.num_open += 1
        try:
            await self._bounded_post(scope, receive, send)
        finally:
            self.num_open -= 1
            if exchange.key is not None:
                self.limiter.end(exchange.key)

    async def _post(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await _read_body(receive)
        if body is None:
            return
        exchange: Exchange = scope["state"][_EXCHANGE]
        request = self._routed(scope, body, exchange)
        await run_until_disconnect(self._exchange(request, exchange, send), receive)

    async def _exchange(self, request: RoutedRequest, exchange: Exchange, send: Send) -> None:
        with await self._dispatcher.answer(request) as answer:
            exchange.model = request.model or ""
            exchange.backend = answer.backend.address.url
            exchange.first_byte_s = self._clock.now() - exchange.began
            self._metrics.first_byte(exchange.backend, exchange.first_byte_s)
            headers = without_hops(answer.head.headers)
            if exchange.key is not None and exchange.key.requests_per_minute is not None:
                headers.append((b"x-ratelimit-limit-requests", b"%d" % exchange.key.requests_per_minute))
                headers.append((b"x-ratelimit-remaining-requests", b"%d" % (exchange.requests_left or 0)))
            exchange.started = True
            exchange.status = answer.head.status
            await send_answer(answer, headers, send, SLOW_CLIENT_S)

    def _routed(self, scope: Scope, body: bytes, exchange: Exchange) -> RoutedRequest:
        received = self._clock.now()
        fields = read_fields(body)
        session = Headers(scope=scope).get(self._config.session_key, "") if self._config.session_key else ""
        blocks: list[bytes] = []
        if session:
            blocks = session_blocks(session, fields)
        elif self._config.routing_logic == "prefixaware":
            blocks = prefix_blocks(fields)
        replaced = {HEADER.lower().encode(): scope["state"]["request_id"].encode()}
        if self._config.tenant_header:
            replaced[self._config.tenant_header.lower().encode()] = exchange.key_name.encode()
        client = scope["client"][0] if scope.get("client") else ""
        sent = request_headers(scope["headers"], client=client, scheme=scope["scheme"], replaced=replaced)
        query = scope["query_string"]
        path = scope["path"].encode() + (b"?" + query if query else b"")
        return RoutedRequest(path, sent, body, fields.model, blocks, fields.num_tokens, received)

    def _key(self, scope: Scope) -> KeyLimits:
        key = key_in(Headers(scope=scope))
        place = find_digest(digest_of(key), [known.digest for known in self.keys]) if key else None
        if place is None:
            raise AuthenticationError("A valid API key is needed: send it as the header 'Authorization: Bearer KEY'.")
        return self.keys[place]

    def _begin(self, exchange: Exchange, key: KeyLimits) -> None:
        try:
            exchange.requests_left = self.limiter.begin(key)
        except OverloadedError as error:
            self._metrics.rejections[error.param or ""] += 1
            raise

    def _note_end(self, scope: Scope, exchange: Exchange) -> None:
        if scope["path"] in UNCOUNTED:
            return
        now = self._clock.now()
        if scope["path"] in SERVED:
            self._metrics.ended(
                exchange.backend, exchange.model, exchange.key_name, exchange.status, now - exchange.began
            )
        if not self._config.disable_uvicorn_access_log:
            exchange.log(scope, now)


async def _read_body(receive: Receive) -> bytes | None:
    """The whole body; None if the client goes away first. Raises RequestError if it takes too long, or is too large."""
    parts: list[bytes] = []
    try:
        async with asyncio.timeout(BODY_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                parts.append(message.get("body", b""))
                if not message.get("more_body"):
                    return parts[0] if len(parts) == 1 else b"".join(parts)
    except TimeoutError:
        raise RequestError(f"The request's body did not arrive within {BODY_S:g} s.") from None
