"""What telling about a finished request costs the API process: `python benchmarks/request_log.py`.

Microseconds of the thread's own time for an access log line as text and as JSON, written to /dev/null, and for making
the spans of a trace (which another thread sends). Rounds of each take turns; the median of all rounds is printed.
"""

from __future__ import annotations

import logging
import statistics
import sys
from collections.abc import Callable
from time import thread_time
from typing import Any

from opentelemetry.sdk.trace import SpanProcessor

from quire.engine.metrics.stats import Stats
from quire.foundation.messages.from_engine import End
from quire.foundation.messages.to_engine import Add
from quire.foundation.processes.logs import JsonFormatter
from quire.sampling_params import SamplingParams
from quire.serving.api.auth import Caller
from quire.serving.api.request_record import RequestRecord, log_access
from quire.serving.api.request_traces import RequestTraces
from quire.serving.api.session.output_collector import OutputCollector

ROUNDS, REQUESTS = 40, 500


def finished_request() -> tuple[RequestRecord, dict[str, Any]]:
    """One request of one sequence, as it is when its last byte was sent."""
    stats = Stats()
    add = Add(1, list(range(200)), 200, SamplingParams(max_tokens=100), [], seed=0, arrival=1.0)
    sequence = stats.start_sequence(add)
    stats.record_tokens(sequence, 100, now=1.2)
    stats.record_delivered(sequence, 100)
    sequence.end = End(1, "length", queued_s=0.01, prefill_s=0.1, decode_s=0.9)
    stats.finish_sequence(sequence, "length", now=2.1)
    scope = {
        "type": "http", "method": "POST", "http_version": "1.1", "raw_path": b"/v1/completions", "headers": [],
        "client": ("127.0.0.1", 51234), "state": {"request_id": "7f0c", "caller": Caller("0123456789abcdef")},
    }  # fmt: skip
    return RequestRecord(1.0, 2.1, 200, [OutputCollector([add], [sequence])]), scope


def main() -> None:
    """Print a line for each kind."""
    record, scope = finished_request()
    traces = RequestTraces(SpanProcessor(), "model")
    access = logging.getLogger("quire.access")
    access.setLevel(logging.INFO)
    access.propagate = False
    with open("/dev/null", "w") as nowhere:
        text, json = logging.StreamHandler(nowhere), logging.StreamHandler(nowhere)
        text.setFormatter(logging.Formatter("%(levelname)s %(asctime)s %(message)s", datefmt="%H:%M:%S"))
        json.setFormatter(JsonFormatter("api"))

        def log_with(handler: logging.Handler) -> None:
            access.handlers = [handler]
            log_access(record, scope)

        kinds: dict[str, Callable[[], None]] = {
            "access log, text": lambda: log_with(text),
            "access log, JSON": lambda: log_with(json),
            "trace": lambda: traces.record(record, scope),
        }
        took: dict[str, list[float]] = {name: [] for name in kinds}
        for _ in range(ROUNDS):
            for name, tell in kinds.items():
                began = thread_time()
                for _ in range(REQUESTS):
                    tell()
                took[name].append((thread_time() - began) / REQUESTS * 1e6)
    for name, times in took.items():
        print(f"{name:<18} {statistics.median(times):6.1f} µs a request")


if __name__ == "__main__":
    sys.exit(main())
