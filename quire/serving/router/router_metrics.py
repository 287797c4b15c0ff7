"""What the router counts, in Prometheus' text format. Labels: servers, models that exist, names of keys, statuses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from quire.engine.metrics.histogram import Histogram
from quire.serving.router.fleet import Fleet

_FIRST_BYTE_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_WHOLE_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_ROUTER_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1)


class RouterMetrics:
    """What the router has counted.

    Attributes:
        requests: By server, model, key and status; the server is empty if none was reached.
        failures: By server, and by what it did instead of answering.
        retries: By the server that had failed.
        rejections: By reason.
        reloads: By result.
        first_byte_s, whole_s: By server: from arrival to the first byte of the answer's body, and to its end.
        router_s: From the end of the request's body until a server is chosen.
    """

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str, str, str]] = Counter()
        self.failures: Counter[tuple[str, str]] = Counter()
        self.retries: Counter[str] = Counter()
        self.rejections: Counter[str] = Counter({"requests_per_minute": 0, "max_concurrent_requests": 0})
        self.reloads: Counter[str] = Counter({"ok": 0, "failed": 0})
        self.first_byte_s: dict[str, Histogram] = {}
        self.whole_s: dict[str, Histogram] = {}
        self.router_s = Histogram(_ROUTER_S)

    def first_byte(self, backend: str, seconds: float) -> None:
        self.first_byte_s.setdefault(backend, Histogram(_FIRST_BYTE_S)).observe(seconds)

    def ended(self, backend: str, model: str, key: str, status: int, seconds: float) -> None:
        """Count a request that has ended. `backend` is empty if no server has answered it."""
        self.requests[backend, model, key, str(status)] += 1
        if backend:
            self.whole_s.setdefault(backend, Histogram(_WHOLE_S)).observe(seconds)

    def forget(self, listed: Collection[str]) -> None:
        """Drop what was counted of servers that are not in the list."""
        for backend in [each for each in self.whole_s.keys() | self.first_byte_s.keys() if each not in listed]:
            self.whole_s.pop(backend, None)
            self.first_byte_s.pop(backend, None)
        for pair in [pair for pair in self.failures if pair[0] not in listed]:
            del self.failures[pair]
        for backend in [backend for backend in self.retries if backend not in listed]:
            del self.retries[backend]
        for labels in [labels for labels in self.requests if labels[0] and labels[0] not in listed]:
            del self.requests[labels]


class RouterCollector(Collector):
    """Gives the metrics to Prometheus' registry at each scrape."""

    def __init__(self, metrics: RouterMetrics, fleet: Fleet) -> None:
        self._metrics = metrics
        self._fleet = fleet

    def collect(self) -> Iterator[Metric]:
        metrics = self._metrics
        for name, text, labels, counts in (
            ("requests", "Requests that are over.", ("backend", "model_name", "key", "status"), metrics.requests),
            ("backend_failures", "Requests at which a server failed.", ("backend", "reason"), metrics.failures),
            ("retries", "Requests sent to another server.", ("backend",), metrics.retries),
            ("rejections", "Requests answered by 429, by limit.", ("reason",), metrics.rejections),
            ("reloads", "Times that the list was read again.", ("result",), metrics.reloads),
        ):
            family = CounterMetricFamily(f"quire:router_{name}", text, labels=labels)
            for key, count in counts.items():
                family.add_metric(key if isinstance(key, tuple) else (key,), count)
            yield family
        for name, text, histograms in (
            ("time_to_first_byte_seconds", "From arrival to the answer's first byte.", metrics.first_byte_s),
            ("request_seconds", "From arrival to the answer's end.", metrics.whole_s),
        ):
            by_backend = HistogramMetricFamily(f"quire:router_{name}", text, labels=("backend",))
            for backend, histogram in histograms.items():
                by_backend.add_metric((backend,), histogram.cumulative(), histogram.sum)
            yield by_backend
        own = HistogramMetricFamily(
            "quire:router_choice_seconds", "From a request's last byte until a server is chosen."
        )
        own.add_metric((), metrics.router_s.cumulative(), metrics.router_s.sum)
        yield own
        yield from self._states()

    def _states(self) -> Iterator[Metric]:
        backends = self._fleet.backends
        for name, text, values in (
            ("backend_ready", "Whether a server says that it is ready.", [b.is_ready for b in backends]),
            ("backend_draining", "Whether a server gets no new requests.", [b.address.drain for b in backends]),
            ("circuit_open", "Whether failures keep requests away.", [b.breaker.is_open for b in backends]),
            ("backend_requests", "Requests that a server has.", [b.in_flight for b in backends]),
            ("backend_connections", "Connections to a server.", [b.pool.num_open for b in backends]),
            ("backend_models", "Models and adapters of a server.", [len(b.models) for b in backends]),
        ):
            family = GaugeMetricFamily(f"quire:router_{name}", text, labels=("backend",))
            for backend, value in zip(backends, values, strict=True):
                family.add_metric((backend.address.url,), float(value))
            yield family
