"""One streamed request and when its tokens came.

Owns reading server-sent events with as little work as possible, because what the client does is measured too. Knows
nothing about datasets, arrival times or reports.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx
import msgspec

from quire.bench.datasets import Sample
from quire.errors import reason

Backend = Literal["openai", "vllm", "openai-chat"]
ENDPOINTS: dict[Backend, str] = {
    "openai": "/v1/completions",
    "vllm": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
}


@dataclass
class Outcome:
    """What became of one request. Times in seconds on `time.perf_counter`.

    Attributes:
        start: When it was sent.
        prompt_tokens, output_tokens, cached_tokens: As the server counted them; output tokens are counted from events
            where it did not, cached ones are None.
        first: From `start` to the first token; None if none came.
        last: When the last token came.
        end: When the answer was over, whatever became of it.
        gaps: Between events with tokens.
        error: What went wrong; empty when nothing did.
    """

    start: float
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None
    first: float | None = None
    last: float = 0.0
    end: float = 0.0
    gaps: list[float] = field(default_factory=list)
    text: str = ""
    error: str = ""

    @property
    def whole(self) -> float:
        """From `start` to the last token."""
        return self.last - self.start if self.first is not None else 0.0

    @property
    def per_token(self) -> float | None:
        """Seconds a token after the first; None with fewer than two."""
        return sum(self.gaps) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    def token_came(self, now: float) -> None:
        """An event brought something."""
        if self.first is None:
            self.first = now - self.start
        else:
            self.gaps.append(now - self.last)
        self.last = now


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def said(self) -> str:
        if self.delta is None:
            return self.text or ""
        return self.delta.content or self.delta.reasoning_content or ""

    @property
    def brings_token(self) -> bool:
        """A token's text may be empty; what only opens or closes the stream is no token."""
        opens = self.delta is not None and self.delta.role is not None
        return bool(self.said) or not (opens or self.finish_reason)


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


class StreamingClient:
    """Sends requests to one endpoint of one server.

    Args:
        http: For addresses relative to the server's root.
        endpoint: Path of the API.
        backend: Which API that is.
        body: Fields of every request: model, sampling.
    """

    def __init__(self, http: httpx.AsyncClient, endpoint: str, backend: Backend, body: Mapping[str, Any]) -> None:
        self._http = http
        self._endpoint = endpoint
        self._backend = backend
        self._body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        self._decoder = msgspec.json.Decoder(_Event)

    async def ask(self, sample: Sample) -> Outcome:
        """Send one request and read its stream to the end; an error is in the outcome."""
        content = msgspec.json.encode(self._request(sample))
        headers = {"Content-Type": "application/json"}
        outcome = Outcome(time.perf_counter())
        try:
            async with self._http.stream("POST", self._endpoint, content=content, headers=headers) as answer:
                if answer.status_code != httpx.codes.OK:
                    await answer.aread()
                    outcome.error = f"HTTP {answer.status_code}: {_message(answer)}"
                else:
                    await self._read(answer, outcome)
        except (httpx.HTTPError, msgspec.DecodeError) as error:
            outcome.error = f"{type(error).__name__}: {reason(error)}"
        outcome.end = time.perf_counter()
        return outcome

    def _request(self, sample: Sample) -> dict[str, Any]:
        if self._backend == "openai-chat":
            messages = [{"role": "user", "content": sample.prompt}]
            return {"messages": messages, "max_completion_tokens": sample.output_len, **self._body}
        return {"prompt": sample.prompt, "max_tokens": sample.output_len, **self._body}

    async def _read(self, answer: httpx.Response, outcome: Outcome) -> None:
        events, unread, done = 0, b"", False
        said: list[str] = []
        async for chunk in answer.aiter_raw():
            now = time.perf_counter()
            *lines, unread = (unread + chunk).split(b"\n")
            for line in lines:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    done = True
                    continue
                event = self._decoder.decode(data)
                events += self._take(event, outcome, now, said)
        outcome.text = "".join(said)
        outcome.output_tokens = outcome.output_tokens or events
        if not outcome.error and not done:
            outcome.error = "The stream ended early."
        elif not outcome.error and outcome.first is None:
            outcome.error = "The model ended at once, without text: --ignore-eos makes it go on."

    def _take(self, event: _Event, outcome: Outcome, now: float, said: list[str]) -> bool:
        """Whether the event brought a token."""
        if event.error is not None:
            outcome.error = str(event.error.get("message") if isinstance(event.error, dict) else event.error)
        if event.usage is not None:
            outcome.prompt_tokens = event.usage.prompt_tokens
            outcome.output_tokens = event.usage.completion_tokens
            if event.usage.prompt_tokens_details is not None:
                outcome.cached_tokens = event.usage.prompt_tokens_details.cached_tokens
        if not any(choice.brings_token for choice in event.choices):
            return False
        said.extend(choice.said for choice in event.choices)
        outcome.token_came(now)
        return True


def _message(answer: httpx.Response) -> str:
    try:
        return str(msgspec.json.decode(answer.content)["error"]["message"])
    except (msgspec.DecodeError, LookupError, TypeError):
        return answer.text[:200]
