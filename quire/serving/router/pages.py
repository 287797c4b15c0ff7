"""What the router answers by itself: the page, health, metrics, the models of all servers, and the servers."""

from __future__ import annotations

from urllib.parse import unquote

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.responses import Response

from quire.errors import NotFoundError, UnknownModelError
from quire.serving.api.error_responses import RETRY_AFTER_S, json_answer
from quire.serving.api.page_files import PageFiles
from quire.serving.router.fleet import Fleet
from quire.serving.router.router_metrics import RouterCollector, RouterMetrics
from quire.version import __version__

_STATE = frozenset({"/health", "/ping", "/ready", "/version", "/metrics"})
_MODELS = "/v1/models"
_FILES = "/page/"


def is_public(path: str) -> bool:
    """Whether a page needs no key, as at a server."""
    return path == "/" or path in _STATE or path.startswith(_FILES)


class Pages:
    """Answers to GET requests that reach no server."""

    def __init__(self, fleet: Fleet, metrics: RouterMetrics) -> None:
        self._fleet = fleet
        self._metrics = CollectorRegistry(auto_describe=False)
        self._metrics.register(RouterCollector(metrics, fleet))
        ProcessCollector(registry=self._metrics)
        self._page = PageFiles(has_docs=False, has_engine=False)
        self.draining = False

    def has(self, path: str) -> bool:
        return is_public(path) or path in ("/backends", _MODELS) or path.startswith(f"{_MODELS}/")

    def answer(self, path: str) -> Response:
        """The page of a path. Raises UnknownModelError if no server has the model of the path, and NotFoundError if the
        page at `/` has no such file."""
        if path == "/":
            return self._page.document()
        if path.startswith(_FILES):
            return self._file(path.removeprefix(_FILES))
        if path in ("/health", "/ping"):
            return json_answer(200, {"status": "ok"}, {})
        if path == "/ready":
            return self._ready()
        if path == "/version":
            return json_answer(200, {"version": __version__}, {})
        if path == "/metrics":
            return Response(generate_latest(self._metrics), media_type=CONTENT_TYPE_PLAIN_0_0_4)
        if path == "/backends":
            return json_answer(200, {"backends": [backend.state() for backend in self._fleet.backends]}, {})
        cards = self._fleet.cards()
        if path == _MODELS:
            return json_answer(200, {"object": "list", "data": list(cards.values())}, {})
        name = unquote(path.removeprefix(f"{_MODELS}/"))
        if name not in cards:
            raise UnknownModelError(f"No server has the model '{name[:200]}'.", param="model")
        return json_answer(200, cards[name], {})

    def _file(self, path: str) -> Response:
        version, _, name = path.partition("/")
        if (response := self._page.file(version, name)) is None:
            raise NotFoundError("The page has no such file.")
        return response

    def _ready(self) -> Response:
        complaint = "The router is shutting down." if self.draining else ""
        if not complaint and not self._fleet.is_ready:
            complaint = "No server takes requests."
        if complaint:
            return json_answer(503, {"status": "unavailable", "reason": complaint}, {"Retry-After": RETRY_AFTER_S})
        return json_answer(200, {"status": "ok"}, {})
