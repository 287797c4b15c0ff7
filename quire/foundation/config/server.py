"""The HTTP server, and what it tells about itself while it runs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

from quire.errors import ConfigError
from quire.foundation.config.values import check_positive, check_range

ContentFormat = Literal["auto", "string", "openai"]
REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""How much a request may ask a model to think, from the least to the most."""
_LONGEST_SHUTDOWN_S = 86_400.0
MAX_API_SERVERS = 64
MAX_PORT = 2**16 - 1
OF_ENGINES_IN_PROCESS = ("chat_template", "reasoning_parser")
"""Settings of the server that `LLM` has as well."""
LOGS_OF_SERVER = {"disable_log_stats": True, "enable_log_requests": False}
"""What engines without a server are told in vLLM's examples, too; with these values it asks for nothing."""


BUCKET_FAMILIES: dict[str, tuple[str, ...]] = {
    "request_latency": ("whole_s", "queued_s", "inference_s", "prefill_s", "decode_s"),
    "time_to_first_token": ("first_token_s",),
    "inter_token_latency": ("inter_token_s", "mean_token_s"),
    "request_params_n": ("choices",),
    "request_tokens": ("prompt_lengths", "computed_lengths", "output_lengths", "most_tokens", "max_tokens"),
}
"""Histograms that share buckets, by vLLM's name of the family: attributes of `quire.engine.metrics.stats.Stats`."""
_FIXED_BUCKETS = ("iteration_tokens", "kv_cache_residency", "request_num_preemptions")


@dataclass(frozen=True)
class ServerConfig:
    """The OpenAI-compatible server."""

    host: str | None = None
    """Address to listen on. Default: all interfaces."""
    port: int = 8000
    """Port to listen on; 0 for any free one."""
    api_server_count: int = 1
    """Processes that read requests and write answers, behind one address. Each is connected to every engine."""
    headless: bool = False
    """Serve nothing here: start this machine's ranks for the server at --master-addr, as --node-rank says."""
    api_key: tuple[str, ...] = ()
    """Keys of which a request must carry one, as 'Authorization: Bearer KEY'. Default: the variable QUIRE_API_KEY or
    VLLM_API_KEY; without either, none is needed."""
    allowed_origins: tuple[str, ...] = ("*",)
    """CORS: origins a browser may call from."""
    allowed_methods: tuple[str, ...] = ("*",)
    """CORS: methods."""
    allowed_headers: tuple[str, ...] = ("*",)
    """CORS: headers."""
    allow_credentials: bool = False
    """CORS: whether cookies and authorization travel along."""
    ssl_keyfile: str | None = None
    """TLS key file."""
    ssl_certfile: str | None = None
    """TLS certificate file."""
    ssl_ca_certs: str | None = None
    """File of the certificates that clients' own certificates must come from."""
    ssl_cert_reqs: Literal[0, 1, 2] = 0
    """Whether clients need a certificate of --ssl-ca-certs: 0 no, 1 only if they send one, 2 yes."""
    root_path: str = ""
    """Path under which a proxy serves this server."""
    chat_template: str | None = None
    """A jinja chat template, a file with one, or the name of one of the model's, in place of the model's default."""
    chat_template_content_format: ContentFormat = "auto"
    """How the chat template gets messages' content: as text ('string'), as a list of parts ('openai'), or as the
    template reads it."""
    default_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables of the chat template for requests that do not set them, as JSON."""
    trust_request_chat_template: bool = False
    """Let requests bring a chat template of their own. It runs in a sandbox."""
    tool_call_parser: str | None = None
    """How the model writes tool calls. Default: as its chat template tells."""
    enable_auto_tool_choice: bool = True
    """Let the model choose whether to call a tool."""
    tool_strict_level: Literal["auto", "function", "parameter"] = "auto"
    """What calls are held to, also of tools that are not strict: nothing (auto), the name of a tool and JSON arguments
    (function), or the schema of its parameters as far as a grammar can say it (parameter)."""
    exclude_tools_when_tool_choice_none: bool = False
    """Do not show tools to the model when the request says tool_choice 'none'."""
    reasoning_parser: str | None = None
    """How the model writes its reasoning. Default: as its chat template tells."""
    reasoning_effort_map: dict[str, Any] = field(default_factory=dict)
    """What the chat template gets for an effort that a request asks for, as JSON, such as {"xhigh": "high"}. Efforts
    that are not named stay as they are."""
    unknown_fields: Literal["ignore", "refuse"] = "ignore"
    """What happens to fields of requests that Quire does not know: they are ignored, and the log names each once; or
    refused. One that is spelled like a known field, or would change the answer, is always refused."""
    stream_interval: int = 1
    """Tokens of a choice that a chunk of a stream has, but for its first and its last one. More cost less to send."""
    sse_keep_alive_interval: float = 0.0
    """Seconds after which a stream that has nothing to say sends a comment, so that nobody takes it for dead: a long
    prompt may take minutes. 0: never."""
    enable_per_request_metrics: bool = False
    """Report the times of a request as 'metrics' in answers of /v1/chat/completions and /v1/completions: of a stream,
    in a chunk of its own at the end, or in that with the usage."""
    enable_force_include_usage: bool = False
    """Report token counts at the end of each stream, as with stream_options.include_usage."""
    return_tokens_as_token_ids: bool = False
    """Name tokens by id ('token_id:123') in log probabilities, unless the request says otherwise."""
    middleware: tuple[str, ...] = ()
    """Import paths (package.module.name) of ASGI middleware classes, or of coroutine functions of a request and what
    calls the rest. The last one gets a request first."""
    response_role: str = "assistant"
    """Role of chat answers."""
    enable_tokenizer_info_endpoint: bool = False
    """GET /tokenizer_info: the tokenizer's settings and the chat template."""
    enable_request_id_headers: bool = False
    """Send X-Request-Id with every answer, not only where the request brought one."""
    disable_fastapi_docs: bool = False
    """No /docs, /redoc and /openapi.json."""
    uvicorn_log_level: Literal["critical", "error", "warning", "info", "debug", "trace"] = "info"
    """Log level of the HTTP server."""
    disable_uvicorn_access_log: bool = False
    """No access log line for each request. Health and metrics probes are never logged."""
    enable_log_requests: bool = False
    """Log each request's parameters when it arrives: stop strings and bad words, never prompts or answers."""
    log_config_file: str | None = None
    """JSON file for Python's logging.config.dictConfig, which every process of the server applies. Quire's loggers are
    named quire, quire.access and so on, and those of HTTP uvicorn."""
    max_log_len: int | None = None
    """Characters of each text that --enable-log-requests logs. Default: all."""
    disable_log_stats: bool = False
    """No periodic line with throughput and cache use."""
    shutdown_delay: float = 0.0
    """Seconds after SIGTERM in which new requests are still taken, while `/ready` says no already: what a load balancer
    needs to notice."""
    shutdown_timeout: float = 30.0
    """Seconds that open requests get to finish after SIGTERM and --shutdown-delay; then they are ended."""
    max_request_timeout: float | None = None
    """Most seconds that a request may take; it may ask for less ('timeout', X-Request-Timeout). Then a request without
    output gets 504, and any other what there is. Default: no limit."""
    tenant_header: str | None = None
    """Header that names whose a request is, besides its API key; set by a proxy that is trusted. Requests that wait
    are served in turn by these. Default: API keys alone tell."""
    max_restarts: int = 10
    """How often within 10 minutes an engine or API process that dies or hangs is started again, after which the server
    ends. Open requests go on in the next engine. 0: it ends at once."""
    cache_isolation: bool = False
    """Share cached prefixes between requests of one API key and tenant header alone: nobody can tell by the time of
    an answer what another has asked."""
    max_request_bytes: int = 16 * 2**20
    """Largest request body that is read; uploads to /v1/files have a limit of their own."""
    disable_responses_store: bool = False
    """Keep nothing on disk: no /v1/files, no /v1/batches, and of /v1/responses only what needs no earlier response."""
    responses_store_path: str | None = None
    """File for responses, files and batches, which outlive a restart. Servers of this machine may share it. Default:
    quire/store.sqlite in $XDG_STATE_HOME, or else in ~/.local/state."""
    responses_store_max_bytes: int = 2**30
    """What responses, files and batches may take on disk together. Without room the responses that have not been used
    for the longest time go first; files and batches stay, and new ones are refused."""
    responses_store_max_age: float = 30 * 86400.0
    """Seconds after which unused responses, files and finished batches are deleted."""
    responses_store_max_file_bytes: int = 200 * 2**20
    """Largest file that /v1/files takes."""

    @property
    def keeps_model(self) -> str:
        """Why the served model cannot be swapped while the server runs; empty: it can."""
        if self.api_server_count == 1:
            return ""
        return "models are not swapped with --api-server-count above 1: start the server with the other model"

    def __post_init__(self) -> None:
        if any(not key.strip() for key in self.api_key):
            raise ConfigError("--api-key is empty: give a key, or leave the flag out to serve without one.")
        check_range(self, 0, MAX_PORT, "port")
        check_positive(self, "max_request_timeout", "max_request_bytes", "stream_interval")
        check_range(self, 0, None, "max_log_len")
        check_range(self, 0, _LONGEST_SHUTDOWN_S, "shutdown_delay", "shutdown_timeout", "sse_keep_alive_interval")
        _check_efforts(self.reasoning_effort_map)
        check_range(self, 1, MAX_API_SERVERS, "api_server_count")
        if self.headless and self.api_server_count > 1:
            raise ConfigError(
                "--headless serves no requests: give --api-server-count to the head alone.", param="api_server_count"
            )
        check_range(self, 0, None, "max_restarts")
        check_positive(
            self, "responses_store_max_bytes", "responses_store_max_age", "responses_store_max_file_bytes",
            advice="; --disable-responses-store keeps nothing",
        )  # fmt: skip


@dataclass(frozen=True)
class ObservabilityConfig:
    """Logs and traces."""

    log_format: Literal["text", "json"] = "text"
    """How all processes log: lines for people, or a JSON object a line. Never with prompts or answers."""
    otlp_traces_endpoint: str | None = None
    """Where OpenTelemetry traces are sent: http://HOST:4318 (OTLP over HTTP) or grpc://HOST:4317, and https or grpcs
    with TLS. Needs the extra: pip install 'quire[otel]'. Default: there are none."""
    custom_histogram_buckets: dict[str, Any] = field(default_factory=dict)
    """Upper bounds of the buckets of histograms at /metrics, as JSON: lists of numbers by family, which is one of
    request_latency, time_to_first_token, inter_token_latency, request_params_n and request_tokens."""

    def __post_init__(self) -> None:
        for name, bounds in self.custom_histogram_buckets.items():
            if name in _FIXED_BUCKETS:
                why = f"cannot set {name}: its buckets are fixed"
            elif name not in BUCKET_FAMILIES:
                why = f"has no family '{name}': choose of {', '.join(BUCKET_FAMILIES)}"
            elif not _are_bounds(bounds):
                why = f"needs a list of numbers above 0 for {name}, each larger than the one before; got {bounds}"
            else:
                continue
            raise ConfigError(f"--custom-histogram-buckets {why}.", param="custom_histogram_buckets")


def _check_efforts(efforts: dict[str, Any]) -> None:
    for asked, given in efforts.items():
        if asked not in REASONING_EFFORTS or given not in REASONING_EFFORTS:
            raise ConfigError(
                f"--reasoning-effort-map must map efforts to efforts, which are {', '.join(REASONING_EFFORTS)}; got "
                f"'{asked}': {given!r}.",
                param="reasoning_effort_map",
            )


def _are_bounds(value: Any) -> bool:
    if not isinstance(value, list | tuple) or not value:
        return False
    if not all(isinstance(each, int | float) and not isinstance(each, bool) and math.isfinite(each) for each in value):
        return False
    return value[0] > 0 and all(before < after for before, after in pairwise(value))
