"""Gets a request answered: by a server, or by another one if the first fails before the first byte of its answer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from types import TracebackType

from quire.errors import QuireError, RequestTimeoutError, UnavailableError
from quire.foundation.clock import Clock
from quire.foundation.config.router import RouterConfig
from quire.foundation.http_client.connection import Connection
from quire.foundation.http_client.http1 import AnswerHead, HttpError, HttpTimeout
from quire.serving.router.backend import Backend
from quire.serving.router.fleet import Fleet
from quire.serving.router.routed_request import RoutedRequest
from quire.serving.router.router_metrics import RouterMetrics

logger = logging.getLogger(__name__)

SENT_ELSEWHERE = frozenset({429, 502, 503})
"""Statuses by which a server says that it has done nothing for the request, so that another one may."""
_FAILED = frozenset({502, 503})


class Answer:
    """A server's answer, whose body has begun. A context: leaving it before the end tells the server to stop.

    `first` is the first part of the body, and empty if there is no body. `on_failure` is called if the rest of the body
    does not come.
    """

    def __init__(
        self,
        backend: Backend,
        connection: Connection,
        head: AnswerHead,
        first: bytes,
        on_failure: Callable[[HttpError], None],
    ) -> None:
        self.backend = backend
        self.head = head
        self.first = first
        self._connection = connection
        self._on_failure = on_failure

    async def read(self) -> bytes:
        """The next part of the body; empty at its end. Raises HttpError if the rest does not come."""
        try:
            return await self._connection.read()
        except HttpError as error:
            self._on_failure(error)
            raise

    def __enter__(self) -> Answer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.backend.pool.put_back(self._connection)
        self.backend.ended()


class Dispatcher:
    """Sends requests to servers, and counts failures and retries in `metrics`."""

    def __init__(self, fleet: Fleet, config: RouterConfig, metrics: RouterMetrics, clock: Clock) -> None:
        self._fleet = fleet
        self._config = config
        self._metrics = metrics
        self._clock = clock

    async def answer(self, request: RoutedRequest) -> Answer:
        """The answer of the first server that has one. Raises QuireError if no server has one."""
        tried: list[Backend] = []
        backend = self._fleet.choose(request)
        self._metrics.router_s.observe(self._clock.now() - request.received)
        while True:
            tried.append(backend)
            failure: QuireError
            number = backend.began()
            try:
                answer = await self._attempt(backend, request, number)
            except HttpError as error:
                self._failed(backend, number, error)
                if isinstance(error, HttpTimeout):
                    raise RequestTimeoutError("The server that has this model sent nothing for too long.") from error
                failure = UnavailableError("The server with this model does not answer. Try again in a few seconds.")
            else:
                other = self._other(request, tried) if answer.head.status in SENT_ELSEWHERE else None
                if other is None:
                    return answer
                with answer:
                    backend = self._retry(backend, other)
                continue
            other = self._other(request, tried)
            if other is None:
                raise failure
            backend = self._retry(backend, other)

    async def _attempt(self, backend: Backend, request: RoutedRequest, number: int) -> Answer:
        """A server's answer, once its body has begun. `number` is the request's number at the server's breaker. Raises
        HttpError if the server does not answer."""
        connection: Connection | None = None
        try:
            data = request.data_for(backend.pool.address, backend.address.api_key)
            connection = await backend.pool.ask(data, self._config.request_timeout_secs)
            head, first = await connection.head(), await connection.read()
        except BaseException as error:  # the client's disconnect, too
            if connection is not None:
                connection.abort()
            if not isinstance(error, HttpError):
                backend.breaker.left(number)
            backend.ended()
            raise
        if head.status in _FAILED:
            backend.breaker.failed(number)
            self._metrics.failures[backend.address.url, str(head.status)] += 1
        else:
            backend.breaker.succeeded(number)
        return Answer(backend, connection, head, first, partial(self._failed, backend, number))

    def _other(self, request: RoutedRequest, tried: list[Backend]) -> Backend | None:
        if len(tried) > self._config.max_instance_failover_reroute_attempts:
            return None
        try:
            return self._fleet.choose(request, tried)
        except QuireError:
            return None

    def _retry(self, failed: Backend, other: Backend) -> Backend:
        self._metrics.retries[failed.address.url] += 1
        return other

    def _failed(self, backend: Backend, number: int, error: HttpError) -> None:
        backend.breaker.failed(number)
        reason = "timeout" if isinstance(error, HttpTimeout) else "connection"
        self._metrics.failures[backend.address.url, reason] += 1
        logger.warning("Server %s failed: %s", backend.address.url, error)
