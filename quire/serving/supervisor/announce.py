"""What `quire serve` prints: the chosen settings with their reasons, and where to point a client. At most 15 lines."""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Sequence

from quire.foundation.config import Config, ServerConfig
from quire.foundation.processes.logs import set_up_logs
from quire.version import __version__

_log = logging.getLogger("quire.server")
_TRIED = {
    "embed": ("/v1/embeddings", '{"input": "How are you?"}'),
    "classify": ("/classify", '{"input": "How are you?"}'),
    "score": ("/rerank", '{"query": "How are you?", "documents": ["I am fine.", "It rains."]}'),
}
"""What to try of a model that generates no text, by its first task: path and body."""
_TRIED_TOKENS = ("/pooling", '{"input": "How are you?"}')


def log_as_json(process: str = "supervisor") -> None:
    """Print lines as JSON objects from now on, with this name for the process."""
    set_up_logs("json", process)
    _log.handlers = logging.getLogger().handlers
    _log.propagate = False
    _log.setLevel(logging.INFO)


def print_log(line: str) -> None:
    """Print a line to standard error, where logs go."""
    if _log.handlers:
        _log.info("%s", line)
    else:
        print(line, file=sys.stderr, flush=True)


def print_error(line: str) -> None:
    """Print the last line of a server that failed."""
    if _log.handlers:
        _log.error("%s", line)
    else:
        print(f"quire: error: {line}", file=sys.stderr, flush=True)


def announce_settings(config: Config, reasons: Sequence[str]) -> None:
    print_log(f"Quire {__version__}")
    for reason in reasons:
        print_log(f"  {reason}")
    if config.server.headless:
        return
    print_log(f"  access      {access(len(config.server.api_key))}")


def announce_ready(
    config: Config,
    listener: socket.socket,
    seconds: float,
    startup: dict[str, float],
    kv_tokens: int,
    pools: str = "",
) -> None:
    """Print the address and a line to paste; and on a GPU what the KV cache holds, which was an estimate before.
    `pools` is the first task of a model that generates no text."""
    stages = ", ".join(f"{stage} {took:.1f}" for stage, took in startup.items())
    print_log(f"Ready in {seconds:.1f} s{f' (engine: {stages})' if stages else ''}")
    if config.device.device == "cuda":
        print_log(f"  KV cache            {kv_tokens:,} tokens, measured")
    address = url(config.server, listener)
    key = " -H 'Authorization: Bearer YOUR_KEY'" if config.server.api_key else ""
    path, body = "/v1/chat/completions", '{"messages": [{"role": "user", "content": "What can you do?"}]}'
    if pools:
        path, body = _TRIED.get(pools, _TRIED_TOKENS)
        if config.model.skip_tokenizer_init:
            path, body = "/pooling", '{"input": [1, 2, 3]}'
    elif config.model.skip_tokenizer_init:  # nothing that has text works
        path, body = "/inference/v1/generate", '{"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 8}}'
    else:
        print_log(f"  chat in a browser   {address}/")
    print_log(f"  OpenAI clients      {address}/v1")
    curl = f"curl {address}{path} -H 'Content-Type: application/json'{key} -d '{body}'"
    print_log(f"  try it              {curl}")


def url(server: ServerConfig, listener: socket.socket) -> str:
    """The address at which a client on this machine reaches the server."""
    host, port = listener.getsockname()[:2]
    scheme = "https" if server.ssl_certfile else "http"
    if host in ("0.0.0.0", "::"):
        host = "localhost"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}{server.root_path}"


def access(num_keys: int) -> str:
    """Who may send requests, for the lines that a server or a router prints when it is ready."""
    return f"{num_keys} API key(s)" if num_keys else "no API key: everybody who reaches the port (see --api-key)"
