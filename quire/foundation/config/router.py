"""`quire route`: the router in front of several servers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quire.errors import ConfigError
from quire.foundation.config.server import MAX_PORT
from quire.foundation.config.values import check_positive, check_range

RoutingLogic = Literal["prefixaware", "session", "roundrobin"]


@dataclass(frozen=True)
class RouterConfig:
    """A router. Flags have the names that vLLM's routers use, where they have the same meaning."""

    static_backends: tuple[str, ...] = ()
    """Addresses of the servers: http://HOST:PORT, separated by commas or spaces."""
    dynamic_config_yaml: str | None = None
    """YAML or JSON file with servers and keys. It is read again when it changes, and at SIGHUP."""
    host: str | None = None
    """Address to listen on. Default: all interfaces."""
    port: int = 8001
    """Port to listen on; 0 for any free one."""
    routing_logic: RoutingLogic = "prefixaware"
    """How one of several servers with the model is chosen: by the beginning of the prompt ('prefixaware'), by the
    header of --session-key ('session'), or in turn ('roundrobin'). The first two spread what is too much for one."""
    session_key: str | None = None
    """Header that names a session, whose requests go to one server. With 'prefixaware', those without it are placed by
    their prompt."""
    api_key: tuple[str, ...] = ()
    """Keys of which a request must carry one, as 'Authorization: Bearer KEY'; the file may have more. Default: the
    variable QUIRE_API_KEY or VLLM_API_KEY; without any key, none is needed."""
    backend_api_key: str | None = None
    """Key that servers ask for. Default: the variable QUIRE_BACKEND_API_KEY. Without one, and without keys of the
    router, clients' own keys are passed on."""
    backend_ssl_ca_certs: str | None = None
    """File of the certificates that those of https servers must come from. Default: the system's."""
    tenant_header: str | None = None
    """Header that tells servers whose a request is (their --tenant-header): the name of its key. What clients send
    under this name is dropped."""
    requests_per_minute: int | None = None
    """Requests that each key may send in a minute, a burst of a minute's at most. Default: no limit."""
    max_concurrent_requests: int | None = None
    """Requests that each key may have open. Default: no limit."""
    max_instance_failover_reroute_attempts: int = 3
    """To how many other servers a request is sent when one fails before the first byte of its answer."""
    request_timeout_secs: float = 600.0
    """Most seconds without a byte from a server: until its answer begins, and between two parts of it."""
    health_check_interval: float = 2.0
    """Seconds between two questions for the health (/ready, or /health) and the models of a server."""
    engine_stats_interval: float = 5.0
    """Seconds between two questions for the load of a server (/metrics)."""
    cb_failure_threshold: int = 3
    """Requests in a row that fail at a server, after which it gets none for a while."""
    cb_timeout_duration_secs: float = 10.0
    """How long that is; then a single request tries."""
    max_request_bytes: int = 16 * 2**20
    """Largest request body that is read."""
    shutdown_timeout: float = 30.0
    """Seconds that open requests get to finish after SIGTERM; then they are ended."""
    disable_uvicorn_access_log: bool = False
    """No access log line for each request."""
    log_format: Literal["text", "json"] = "text"
    """Logs as lines for people, or as a JSON object a line."""
    ssl_keyfile: str | None = None
    """TLS key file."""
    ssl_certfile: str | None = None
    """TLS certificate file."""
    ssl_ca_certs: str | None = None
    """File of the certificates that clients' own certificates must come from."""
    ssl_cert_reqs: Literal[0, 1, 2] = 0
    """Whether clients need a certificate of --ssl-ca-certs: 0 no, 1 only if they send one, 2 yes."""

    def __post_init__(self) -> None:
        if any(not key.strip() for key in self.api_key):
            raise ConfigError("--api-key is empty: give a key, or leave the flag out to route without one.")
        if self.routing_logic == "session" and not self.session_key:
            raise ConfigError("--routing-logic session needs --session-key, the name of a header.", param="session_key")
        if self.routing_logic == "roundrobin" and self.session_key:
            raise ConfigError(
                "--session-key has no meaning with --routing-logic roundrobin: leave one of them out.",
                param="session_key",
            )
        check_positive(
            self, "request_timeout_secs", "health_check_interval", "engine_stats_interval", "cb_timeout_duration_secs",
            "cb_failure_threshold", "max_request_bytes", "requests_per_minute", "max_concurrent_requests",
        )  # fmt: skip
        check_range(self, 0, None, "max_instance_failover_reroute_attempts", "shutdown_timeout")
        check_range(self, 0, MAX_PORT, "port")
