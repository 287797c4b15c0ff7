"""OpenTelemetry traces: for each request that is over, a span with its phases as children.

The SDK is imported only where --otlp-traces-endpoint asks for it. It sends batches of spans from a thread of its own,
so a collector that is slow or gone costs requests nothing. Spans and attributes have vLLM's names, which follow
OpenTelemetry's conventions for generative AI where these have one.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import Scope

from quire.engine.metrics.stats import SequenceStats
from quire.errors import ConfigError
from quire.foundation.config import Config, environment
from quire.foundation.messages.to_engine import Add
from quire.serving.api.request_record import RequestCost, RequestRecord
from quire.version import __version__

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

MAX_SEQUENCES = 32
"""Maximum number of sequences of one request whose phases become spans."""
FLUSH_S = 3.0
"""Seconds for the last spans to be sent at the end."""
_SCHEMES = ("http", "https", "grpc", "grpcs")
_TRACES_PATH = "/v1/traces"


def open_traces(config: Config) -> RequestTraces | None:
    """Where requests are traced; None for nowhere. Raises ConfigError for no URL, or without the SDK."""
    endpoint = config.observability.otlp_traces_endpoint
    if endpoint is None:
        return None
    parts = urlsplit(endpoint)
    if parts.scheme not in _SCHEMES or not parts.hostname:
        raise ConfigError(
            f"--otlp-traces-endpoint must be like http://HOST:4318 or grpc://HOST:4317, got '{endpoint}'.",
            param="otlp_traces_endpoint",
        )
    try:
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        exporter = _exporter(endpoint)
    except ImportError as error:
        raise ConfigError(
            f"--otlp-traces-endpoint needs OpenTelemetry's SDK ({error}): pip install 'quire[otel]'.",
            param="otlp_traces_endpoint",
        ) from error
    return RequestTraces(BatchSpanProcessor(exporter), config.model.names[0])


def _exporter(endpoint: str) -> SpanExporter:
    parts = urlsplit(endpoint)
    if parts.scheme.startswith("grpc"):
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc

        return Grpc(parts.netloc, insecure=parts.scheme == "grpc")
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Http

    return Http(endpoint if parts.path.strip("/") else endpoint.rstrip("/") + _TRACES_PATH)


class RequestTraces:
    """Makes the spans of finished requests, which name the model."""

    def __init__(self, processor: SpanProcessor, model: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        name = {"service.name": environment.trace_service_name(), "service.version": __version__}
        self._provider: TracerProvider = TracerProvider(resource=Resource.create(name), shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("quire", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._model = model

    def record(self, record: RequestRecord, scope: Scope) -> None:
        """Trace one request, unless nothing was handed to the engine."""
        cost = record.cost()
        if cost is None:
            return
        headers = Headers(scope=scope)
        carrier = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        self._trace(record, cost, scope, self._propagator.extract(carrier))

    def close(self) -> None:
        """Send what is not sent yet, if that can be done soon."""
        flushing = threading.Thread(target=self._provider.force_flush, daemon=True)
        flushing.start()
        flushing.join(FLUSH_S)

    def _trace(self, record: RequestRecord, cost: RequestCost, scope: Scope, context: Any) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        since_1970 = time.time() - time.monotonic()

        def wall(seconds: float) -> int:
            return int((since_1970 + seconds) * 1e9)

        span: Span = self._tracer.start_span(
            "llm_request",
            context,
            SpanKind.SERVER,
            self._attributes(record, cost, scope),
            start_time=wall(record.began),
        )
        if record.status >= 500 or "error" in cost.finish_reasons:
            span.set_status(Status(StatusCode.ERROR))
        inside = set_span_in_context(span, context)
        for index, (add, stats) in enumerate(record.sequences[:MAX_SEQUENCES]):
            for phase, (begin, end) in _phases(add, stats).items():
                attributes = {"gen_ai.request.id": scope["state"]["request_id"], "quire.sequence": index}
                child = self._tracer.start_span(phase, inside, attributes=attributes, start_time=wall(begin))
                child.end(wall(end))
        span.end(wall(record.ended))

    def _attributes(self, record: RequestRecord, cost: RequestCost, scope: Scope) -> dict[str, Any]:
        sampling = record.sequences[0][0].sampling
        values = {
            "gen_ai.response.model": self._model,
            "gen_ai.request.id": scope["state"]["request_id"],
            "gen_ai.request.n": sampling.n,
            "gen_ai.request.max_tokens": sampling.max_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.response.finish_reasons": cost.finish_reasons,
            "gen_ai.usage.prompt_tokens": cost.prompt_tokens,
            "gen_ai.usage.cached_tokens": cost.cached_tokens,
            "gen_ai.usage.completion_tokens": cost.completion_tokens,
            "gen_ai.usage.num_sequences": cost.sequences,
            "gen_ai.latency.time_to_first_token": cost.first_token_s,
            "gen_ai.latency.e2e": record.ended - record.began,
            "gen_ai.latency.time_in_queue": cost.queue_s,
            "gen_ai.latency.time_in_model_prefill": cost.prefill_s,
            "gen_ai.latency.time_in_model_decode": cost.decode_s,
            "http.request.method": scope["method"],
            "http.route": getattr(scope.get("route"), "path", None),
            "http.response.status_code": record.status,
        }
        if cost.prefill_s is not None and cost.decode_s is not None:
            values["gen_ai.latency.time_in_model_inference"] = cost.prefill_s + cost.decode_s
        return {name: value for name, value in values.items() if value is not None}


def _phases(add: Add, stats: SequenceStats) -> dict[str, tuple[float, float]]:
    """Begin and end of each phase, in monotonic seconds; without the engine's End only what its tokens tell."""
    if stats.end is not None:
        first = add.arrival + stats.end.queued_s
        token = first + stats.end.prefill_s
        phases = {"queue": (add.arrival, first), "prefill": (first, token)}
        return {**phases, "decode": (token, token + stats.end.decode_s)} if stats.first_token else phases
    if stats.first_token is None:
        return {}
    return {"decode": (stats.first_token, stats.last_token)}
