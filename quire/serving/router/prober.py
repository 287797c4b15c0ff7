"""Asks servers how they are: ready or not, which models, how much load. One task for each server."""

from __future__ import annotations

import asyncio
import logging
import re

import msgspec

from quire.foundation.config.router import RouterConfig
from quire.foundation.http_client.http1 import HttpError
from quire.serving.router.backend import Backend, ScrapedLoad
from quire.serving.router.fleet import Fleet

logger = logging.getLogger(__name__)

PROBE_S = 5.0
"""A server that does not answer a question for this long is not well."""
LOST_AFTER = 2
"""After this many questions in a row without an answer, requests that wait for a first byte are sent elsewhere."""
MAX_BYTES = 8 * 2**20
_MAX_MODELS = 4_096
_NAMES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "gpu_cache_usage_perc")
_SAMPLE = re.compile(rb"^vllm:(\w+)(\{[^}\n]*\})? ([0-9.eE+-]+)", re.M)
_CACHE = re.compile(rb"^vllm:cache_config_info\{(.*)\}", re.M)
_LABEL = re.compile(rb'\b(block_size|num_gpu_blocks)="(\d{1,12})"')


class _NotUnderstood(Exception):
    """A server answers something else than it was asked."""


class Prober:
    """Keeps the states of a fleet's servers up to date."""

    def __init__(self, fleet: Fleet, config: RouterConfig) -> None:
        self._fleet = fleet
        self._config = config
        self._tasks: dict[Backend, asyncio.Task[None]] = {}

    def follow(self) -> None:
        """Ask the servers that are listed now, and no others. Call it when the list has changed."""
        listed = set(self._fleet.backends)
        for backend in [backend for backend in self._tasks if backend not in listed]:
            self._tasks.pop(backend).cancel()
        for backend in listed - self._tasks.keys():
            self._tasks[backend] = asyncio.create_task(self._keep_asking(backend))

    def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()

    async def _keep_asking(self, backend: Backend) -> None:
        loop, asked_load, unanswered = asyncio.get_running_loop(), -1e9, 0
        while True:
            try:
                complaint = await self._complaint(backend)
                unanswered = 0
                no_models = await self._learn_models(backend)
                complaint = complaint or no_models
                if loop.time() - asked_load >= self._config.engine_stats_interval:
                    asked_load = loop.time()
                    backend.load = await self._load(backend)
            except _NotUnderstood as error:
                complaint = str(error)
            except HttpError as error:
                complaint, unanswered = str(error), unanswered + 1
                if unanswered >= LOST_AFTER:
                    backend.pool.fail_waiting("It does not answer any more.")
            except Exception:
                logger.exception("Server %s could not be asked.", backend.address.url)
                complaint = "Its answers are not understood."
            self._note(backend, complaint)
            backend.pool.close_old()
            await asyncio.sleep(self._config.health_check_interval)

    def _note(self, backend: Backend, complaint: str) -> None:
        if bool(complaint) != bool(backend.complaint):
            if complaint:
                logger.warning("Server %s gets no requests: %s", backend.address.url, complaint)
            else:
                logger.info("Server %s is ready: %s", backend.address.url, ", ".join(sorted(backend.models))[:200])
                self._fleet.forget_cache(backend)
        backend.complaint = complaint

    async def _complaint(self, backend: Backend) -> str:
        """Why a server should get no requests; empty if there is no reason."""
        status, body = await _get(backend, b"/ready")
        if status in (404, 405):  # vLLM has no /ready
            status, body = await _get(backend, b"/health")
        if 200 <= status < 300:
            return ""
        return f"It answers {status}: {body[:200].decode(errors='replace')}"

    async def _learn_models(self, backend: Backend) -> str:
        """Why requests cannot name any model; empty if they can. A server without a list keeps its last one. Raises
        _NotUnderstood if the answer is no list of models."""
        status, body = await _get(backend, b"/v1/models")
        if status == 200:
            try:
                cards = msgspec.json.decode(body)["data"]
                backend.learn_cards({str(card["id"]): card for card in cards[:_MAX_MODELS]})
            except (msgspec.DecodeError, KeyError, TypeError, UnicodeDecodeError, RecursionError) as error:
                raise _NotUnderstood("Its /v1/models is not OpenAI's.") from error
        if backend.models:
            return ""
        return "It has no models." if status == 200 else f"It answers {status} to GET /v1/models."

    async def _load(self, backend: Backend) -> ScrapedLoad:
        """The server's load; zeros if it cannot be learned, because a server may serve requests without metrics."""
        try:
            status, body = await _get(backend, b"/metrics")
        except (HttpError, _NotUnderstood):
            return ScrapedLoad()
        return parse_load(body) if status == 200 else ScrapedLoad()


def parse_load(metrics: bytes) -> ScrapedLoad:
    """The load of a server from its metrics, under vLLM's names; all of its engines together."""
    values: dict[str, list[float]] = {}
    for name, _, value in _SAMPLE.findall(metrics):
        if (text := name.decode()) in _NAMES:
            values.setdefault(text, []).append(_number(value))
    usage = values.get("kv_cache_usage_perc") or values.get("gpu_cache_usage_perc") or [0.0]
    return ScrapedLoad(
        running=int(sum(values.get("num_requests_running", ()))),
        waiting=int(sum(values.get("num_requests_waiting", ()))),
        cache_tokens=sum(_cache_tokens(dict(_LABEL.findall(labels))) for labels in _CACHE.findall(metrics)),
        cache_usage=min(1.0, max(0.0, sum(usage) / len(usage))),
    )


def _cache_tokens(labels: dict[bytes, bytes]) -> int:
    return int(labels.get(b"block_size", 0)) * int(labels.get(b"num_gpu_blocks", 0))


def _number(text: bytes) -> float:
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if 0 <= value < 1e12 else 0.0


async def _get(backend: Backend, path: bytes) -> tuple[int, bytes]:
    """Status and body of a GET on a new connection: an old one does not show whether the server still listens. Raises
    HttpError if there is no answer, and _NotUnderstood if it is too large."""
    headers = [(b"connection", b"close")]
    if api_key := backend.address.api_key:
        headers.append((b"authorization", b"Bearer " + api_key.encode()))
    data = backend.pool.address.request(b"GET", path, headers)
    connection = await backend.pool.connect()
    try:
        async with asyncio.timeout(PROBE_S):
            connection.request(data, PROBE_S)
            head, body = await connection.head(), bytearray()
            while part := await connection.read():
                body += part
                if len(body) > MAX_BYTES:
                    raise _NotUnderstood(f"Its {path.decode()} is too large.")
    except TimeoutError:
        raise HttpError(f"It did not answer GET {path.decode()} within {PROBE_S:g} s.") from None
    finally:
        connection.abort()
    return head.status, bytes(body)
