"""One streamed request and when its tokens came.

Owns reading server-sent events with as little work as possible, because what the client does is measured too: it takes
time from the server, and delays the clock that it reads. Knows nothing about datasets, arrival times or reports.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import msgspec

from quire.errors import reason
from quire.foundation.http_client.connection import OnBody
from quire.foundation.http_client.http1 import HttpAddress, HttpError, encoded_headers
from quire.foundation.http_client.pool import ConnectionPool, unchecked_tls
from quire.tools.bench.datasets import Sample

OK = 200
Backend = Literal[
    "openai", "quire", "vllm", "openai-chat", "openai-embeddings", "openai-embeddings-chat", "vllm-pooling",
    "vllm-rerank", "embeddings", "rerank",
]  # fmt: skip
ENDPOINTS: dict[Backend, str] = {
    "openai": "/v1/completions",
    "quire": "/v1/completions",
    "vllm": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
    "openai-embeddings": "/v1/embeddings",
    "openai-embeddings-chat": "/v1/embeddings",
    "vllm-pooling": "/pooling",
    "vllm-rerank": "/v1/rerank",
    "embeddings": "/v1/embeddings",
    "rerank": "/v1/rerank",
}
GENERATING: tuple[Backend, ...] = ("openai", "quire", "vllm", "openai-chat")
"""Backends whose answers are streams of tokens; all others are answered as a whole."""
RERANKING: tuple[Backend, ...] = ("vllm-rerank", "rerank")


class Connections:
    """Open connections to one server, as a context. A connection has to open within `connect_s` seconds, and takes the
    next request after its whole answer. Raises ValueError if the URL or a header cannot be used."""

    def __init__(self, url: str, connect_s: float, headers: Mapping[str, str] = {}, *, insecure: bool = False) -> None:
        self._headers = encoded_headers({"Accept": "*/*", "Content-Type": "application/json", **headers})
        self._pool = ConnectionPool(
            HttpAddress.of(url), unchecked_tls() if insecure else None, connect_s, max_idle=sys.maxsize
        )

    async def __aenter__(self) -> Connections:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._pool.close()

    async def post(self, path: str, body: bytes, on_body: OnBody) -> int:
        """Send a JSON body, pass each part of the answer to `on_body`, and return the status at its end. Raises
        HttpError if there is no answer, or it breaks off."""
        data = self._pool.address.request(b"POST", path.encode(), self._headers, body)
        connection = await self._pool.ask(data, None, on_body)
        status = (await connection.head()).status
        self._pool.put_back(connection)
        return status


@dataclass
class Outcome:
    """The result of one request. Times are seconds of `time.perf_counter`.

    Attributes:
        prompt_tokens, output_tokens, cached_tokens: As the server counted them; where it did not,
            output tokens are counted from the chunks, and cached ones are None.
        ttft: From `start` to the first token; None if none came, or only tokens without text.
        end: When the response ended, with or without an error.
        itls: Seconds between chunks with tokens.
    """

    start: float
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None
    ttft: float | None = None
    last: float = 0.0
    end: float = 0.0
    itls: list[float] = field(default_factory=list)
    text: str = ""
    error: str = ""

    @property
    def e2e_latency(self) -> float:
        """Seconds from `start` to the last token, or to the end of an answer without tokens."""
        return (self.end if self.ttft is None else self.last) - self.start

    @property
    def tpot(self) -> float | None:
        """Seconds for each token after the first; None for fewer than two tokens, or where no chunk came with one."""
        if self.ttft is None or self.output_tokens < 2:
            return None
        return sum(self.itls) / (self.output_tokens - 1)

    def token_came(self, now: float) -> None:
        if self.ttft is None:
            self.ttft = now - self.start
        else:
            self.itls.append(now - self.last)
        self.last = now


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None

    @property
    def said(self) -> str:
        if self.delta is None:
            return self.text or ""
        return self.delta.content or self.delta.reasoning_content or ""

    @property
    def num_tokens(self) -> int:
        """The number of token ids, if they are sent; else 1, unless the chunk only opens or closes the stream."""
        if self.token_ids is not None:
            return len(self.token_ids)
        opens = self.delta is not None and self.delta.role is not None
        return int(bool(self.said) or not (opens or self.finish_reason))


class _CachedTokens(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _CachedTokens | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


class Client(Protocol):
    """Sends requests to one endpoint of one server."""

    async def ask(self, sample: Sample) -> Outcome: ...


class StreamingClient:
    """Sends requests to one endpoint of one server. `body` has the fields that every request has: model, sampling."""

    def __init__(self, connections: Connections, endpoint: str, backend: Backend, body: Mapping[str, Any]) -> None:
        self._connections = connections
        self._endpoint = endpoint
        self._backend = backend
        self._body = {**body, "stream": True, "stream_options": {"include_usage": True}}

    async def ask(self, sample: Sample) -> Outcome:
        """Send one request and read its stream to the end; an error is in the outcome."""
        content = msgspec.json.encode(self._request(sample))
        reading = _Reading(Outcome(time.perf_counter()))
        outcome = reading.outcome
        try:
            status = await self._connections.post(self._endpoint, content, reading.on_body)
            if status == OK:
                reading.finish()
            else:
                outcome.error = f"HTTP {status}: {_message(reading.body)}"
        except (HttpError, msgspec.DecodeError) as error:
            cause = error.__cause__ or error
            outcome.error = f"{type(cause).__name__}: {reason(cause)}"
        outcome.end = time.perf_counter()
        return outcome

    def _request(self, sample: Sample) -> dict[str, Any]:
        if self._backend == "openai-chat":
            said = enumerate((sample.prompt, *sample.others))
            messages: list[dict[str, Any]] = [
                {"role": "assistant" if turn % 2 else "user", "content": text} for turn, text in said
            ]
            if sample.images:
                parts = [{"type": "image_url", "image_url": {"url": url}} for url in sample.images]
                messages[0]["content"] = [{"type": "text", "text": sample.prompt}, *parts]
            return {"messages": messages, "max_completion_tokens": sample.output_len, **self._body}
        return {"prompt": sample.prompt, "max_tokens": sample.output_len, **self._body}


class PoolingClient:
    """Sends requests for vectors or ranks to one endpoint of one server. `body` has the fields that every request
    has."""

    def __init__(self, connections: Connections, endpoint: str, backend: Backend, body: Mapping[str, Any]) -> None:
        self._connections = connections
        self._endpoint = endpoint
        self._backend = backend
        self._body = body

    async def ask(self, sample: Sample) -> Outcome:
        """Send one request and read its answer; an error is in the outcome."""
        content = msgspec.json.encode(self._request(sample))
        outcome, pieces = Outcome(time.perf_counter()), list[bytes]()
        try:
            status = await self._connections.post(self._endpoint, content, pieces.append)
            if status == OK:
                usage = msgspec.json.decode(b"".join(pieces), type=_Event).usage or _Usage()
                outcome.prompt_tokens = usage.prompt_tokens
                if usage.prompt_tokens_details is not None:
                    outcome.cached_tokens = usage.prompt_tokens_details.cached_tokens
            else:
                outcome.error = f"HTTP {status}: {_message(b''.join(pieces))}"
        except (HttpError, msgspec.DecodeError) as error:
            cause = error.__cause__ or error
            outcome.error = f"{type(cause).__name__}: {reason(cause)}"
        outcome.end = time.perf_counter()
        return outcome

    def _request(self, sample: Sample) -> dict[str, Any]:
        if self._backend in RERANKING:
            return {"query": sample.prompt, "documents": [*sample.others], **self._body}
        if self._backend == "openai-embeddings-chat":
            return {"messages": [{"role": "user", "content": sample.prompt}], **self._body}
        return {"input": [sample.prompt, *sample.others], **self._body}


class _Reading:
    """Fills an outcome while its response arrives."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self._unread = b""
        self._other: list[bytes] = []
        self._said: list[str] = []
        self._num_tokens = 0
        self._done = False

    def on_body(self, piece: bytes) -> None:
        now = time.perf_counter()
        *lines, self._unread = (self._unread + piece).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                if line:
                    self._other.append(line)
            elif (data := line[5:].strip()) == b"[DONE]":
                self._done = True
            else:
                self._take(_decode(data), now)

    @property
    def body(self) -> bytes:
        """The lines that are no events."""
        return b"\n".join([*self._other, self._unread])

    def finish(self) -> None:
        outcome = self.outcome
        outcome.text = "".join(self._said)
        outcome.output_tokens = outcome.output_tokens or self._num_tokens
        if not outcome.error and not self._done:
            outcome.error = "The stream ended early."

    def _take(self, event: _Event, now: float) -> None:
        outcome = self.outcome
        if event.error is not None:
            outcome.error = str(event.error.get("message") if isinstance(event.error, dict) else event.error)
        if event.usage is not None:
            outcome.prompt_tokens = event.usage.prompt_tokens
            outcome.output_tokens = event.usage.completion_tokens
            if event.usage.prompt_tokens_details is not None:
                outcome.cached_tokens = event.usage.prompt_tokens_details.cached_tokens
        num_tokens = 0
        for choice in event.choices:
            num_tokens += choice.num_tokens
            self._said.append(choice.said)
        if num_tokens:
            self._num_tokens += num_tokens
            outcome.token_came(now)


def _message(body: bytes) -> str:
    try:
        return str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.DecodeError, LookupError, TypeError):
        return body.decode(errors="replace")[:200]
