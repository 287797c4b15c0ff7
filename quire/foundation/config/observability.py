"""What a server tells about itself while it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ObservabilityConfig:
    """Logs and traces."""

    log_format: Literal["text", "json"] = "text"
    """How all processes log: lines for people, or a JSON object a line. Never with prompts or answers."""
    otlp_traces_endpoint: str | None = None
    """Where OpenTelemetry traces are sent: http://HOST:4318 (OTLP over HTTP) or grpc://HOST:4317, and https or grpcs
    with TLS. Needs the extra: pip install 'quire[otel]'. Default: there are none."""
