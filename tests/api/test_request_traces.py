"""Spans of requests, received as a collector receives them: OTLP over HTTP and over gRPC."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as otlp_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from quire.errors import ConfigError
from quire.serving.api.request_traces import RequestTraces, open_traces
from tests.api.server import Server, resolved, running

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
Take = Callable[[Any], None]


@contextmanager
def http_collector(take: Take) -> Iterator[str]:
    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            body = self.rfile.read(int(self.headers["Content-Length"]))
            take(otlp.ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.end_headers()
            self.wfile.write(otlp.ExportTraceServiceResponse().SerializeToString())

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@contextmanager
def grpc_collector(take: Take) -> Iterator[str]:
    class Receiver(otlp_grpc.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            take(request)
            return otlp.ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(1))
    otlp_grpc.add_TraceServiceServicer_to_server(Receiver(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"grpc://127.0.0.1:{port}"
    server.stop(None)


class Traced:
    """A server, and what its collector has received."""

    def __init__(self, server: Server, traces: RequestTraces, received: list[Any]) -> None:
        self.server = server
        self._traces = traces
        self._received = received

    def ask(self, request_id: str, body: dict[str, Any], **headers: str) -> int:
        """The status of a completion's answer."""
        headers["X-Request-Id"] = request_id
        return self.server.post("/v1/completions", body, headers=headers).status_code

    def spans(self, request_id: str) -> dict[str, Span]:
        """Of a request, by name; numbered where there are several."""
        for _ in range(1_000):
            self._traces.close()  # sends what there is
            found = [span for span in self._spans() if values(span)["gen_ai.request.id"] == request_id]
            if any(span.name == "llm_request" for span in found):
                return {f"{s.name} {values(s).get('quire.sequence', '')}".strip(): s for s in found}
            threading.Event().wait(0.05)
        raise AssertionError(request_id)

    def service(self) -> str:
        """What the server calls itself."""
        (name,) = {a.value.string_value for a in self._received[0].resource_spans[0].resource.attributes
                   if a.key == "service.name"}  # fmt: skip
        return name

    def _spans(self) -> list[Span]:
        return [
            span
            for request in self._received
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


def values(span: Span) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}


@pytest.fixture(scope="module", params=[http_collector, grpc_collector], ids=["http", "grpc"])
def traced(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    received: list[Any] = []
    directory = tmp_path_factory.mktemp("model")
    with request.param(received.append) as endpoint:
        traces = open_traces(resolved(directory, otlp_traces_endpoint=endpoint))
        assert traces is not None
        with running(directory, traces=traces) as server:
            yield Traced(server, traces, received)


def test_phases_are_children_of_the_request_which_is_the_callers_child(traced: Traced) -> None:
    body = {"prompt": "abcdef", "max_tokens": 6, "temperature": 0.5, "top_p": 0.9, "ignore_eos": True}
    assert traced.ask("trace-1", body, traceparent=f"00-{TRACE}-{PARENT}-01", tracestate="vendor=1") == 200
    spans = traced.spans("trace-1")
    assert set(spans) == {"llm_request", "queue 0", "prefill 0", "decode 0"}
    request = spans.pop("llm_request")
    assert (request.trace_id.hex(), request.parent_span_id.hex()) == (TRACE, PARENT)
    assert request.trace_state == "vendor=1"
    assert request.kind == Span.SPAN_KIND_SERVER
    assert {span.parent_span_id for span in spans.values()} == {request.span_id}
    assert {span.trace_id.hex() for span in spans.values()} == {TRACE}
    queue, prefill, decode = (spans[f"{name} 0"] for name in ("queue", "prefill", "decode"))
    slack = 1_000_000  # ns: numbers of two processes' clocks are rounded
    assert request.start_time_unix_nano <= queue.start_time_unix_nano + slack
    assert queue.end_time_unix_nano == prefill.start_time_unix_nano
    assert prefill.end_time_unix_nano == decode.start_time_unix_nano
    assert queue.start_time_unix_nano <= queue.end_time_unix_nano <= prefill.end_time_unix_nano
    for span, name in ((queue, "time_in_queue"), (prefill, "time_in_model_prefill"), (decode, "time_in_model_decode")):
        took = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
        assert took == pytest.approx(values(request)[f"gen_ai.latency.{name}"], abs=2e-6), name
    assert values(request)["gen_ai.latency.time_in_model_prefill"] > 1e-5
    assert decode.end_time_unix_nano <= request.end_time_unix_nano + slack
    assert traced.service() == "quire"


def test_attributes_are_those_of_the_conventions(traced: Traced) -> None:
    body = {"prompt": "abcdef", "max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "n": 2, "ignore_eos": True}
    traced.ask("trace-2", body)
    spans = traced.spans("trace-2")
    assert "decode 1" in spans
    said = values(spans["llm_request"])
    assert said["gen_ai.request.temperature"] == 0.5
    assert said["gen_ai.request.top_p"] == 0.9
    assert (said["gen_ai.request.n"], said["gen_ai.request.max_tokens"]) == (2, 3)
    assert (said["gen_ai.usage.completion_tokens"], said["gen_ai.usage.num_sequences"]) == (6, 2)
    assert said["gen_ai.usage.prompt_tokens"] > 0
    assert said["gen_ai.response.model"] == "tiny"
    assert said["http.route"] == "/v1/completions"
    prefill, decode = said["gen_ai.latency.time_in_model_prefill"], said["gen_ai.latency.time_in_model_decode"]
    assert said["gen_ai.latency.time_in_model_inference"] == pytest.approx(prefill + decode)
    assert said["gen_ai.latency.time_in_queue"] + prefill + decode <= said["gen_ai.latency.e2e"] + 0.001
    assert 0 < said["gen_ai.latency.time_to_first_token"] <= said["gen_ai.latency.e2e"]


def test_a_refused_request_is_no_trace_and_a_caller_that_samples_none_gets_none(traced: Traced) -> None:
    assert traced.ask("trace-3", {"prompt": "a", "max_tokens": -1}) == 400
    assert traced.ask("trace-4", {"prompt": "a", "max_tokens": 1}, traceparent=f"00-{TRACE}-{PARENT}-00") == 200
    assert traced.ask("trace-5", {"prompt": "a", "max_tokens": 1}, traceparent="nonsense") == 200
    assert traced.spans("trace-5")["llm_request"].parent_span_id == b""
    ids = {values(span)["gen_ai.request.id"] for span in traced._spans()}
    assert not {"trace-3", "trace-4"} & ids


def test_nothing_that_was_said_is_traced(traced: Traced) -> None:
    traced.ask("trace-6", {"prompt": "a-very-secret-word", "max_tokens": 4})
    assert "secret" not in str(traced.spans("trace-6"))


def test_a_collector_that_is_gone_costs_neither_requests_nor_the_end(tmp_path: Path) -> None:
    traces = open_traces(resolved(tmp_path, otlp_traces_endpoint="http://127.0.0.1:9"))
    assert traces is not None
    with running(tmp_path, traces=traces) as server:
        assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200
        closing = threading.Thread(target=traces.close)
        closing.start()
        closing.join(60)
        assert not closing.is_alive()


@pytest.mark.parametrize("endpoint", ["localhost:4317", "ftp://host", "http://", "grpc:host"])
def test_an_endpoint_that_is_none_is_refused(endpoint: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="http://HOST:4318 or grpc://HOST:4317"):
        open_traces(resolved(tmp_path, otlp_traces_endpoint=endpoint))


def test_without_the_sdk_the_start_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace.export", None)
    with pytest.raises(ConfigError, match=r"pip install 'quire\[otel\]'"):
        open_traces(resolved(tmp_path, otlp_traces_endpoint="http://localhost:4318"))
