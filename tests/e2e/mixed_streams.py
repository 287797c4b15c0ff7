"""Many streams of mixed kinds at once, and what each of them got."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

TOKENS = 48
ROUNDING = 1e-3
"""By how much log probabilities may differ in float32: a replayed prompt is computed in other chunks."""
_KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.9, "top_p": 0.95},
    {"temperature": 1.0, "n": 2},
    {"temperature": 0.8, "logprobs": 2},
    {"temperature": 0, "prompt_logprobs": 1, "stream": False},
    {"temperature": 0.7, "presence_penalty": 0.8, "frequency_penalty": 0.4, "repetition_penalty": 1.1},
    {"temperature": 0, "stop": ["\n\n", " the end"], "min_tokens": 20, "ignore_eos": False},
    {"temperature": 1.0, "bad_words": ["the", " and"], "logit_bias": {"300": 4}},
    {"temperature": 0.9, "structured_outputs": {"regex": "[a-z]{3,9}( [a-z]{3,9}){30,60}"}},
    {"temperature": 0, "structured_outputs": {"json": {"type": "array", "items": {"type": "integer"}, "minItems": 9}}},
    {"temperature": 0, "repetition_detection": {"max_pattern_size": 4, "min_count": 3}},
)


def bodies(count: int) -> list[dict[str, Any]]:
    """Requests to /v1/completions, of all kinds in turn."""
    starts = ("Once upon a time there was a", "The quick brown fox", "In the middle of the night", "A list of")
    return [
        {
            "prompt": f"{starts[i % len(starts)]} {i}",
            "max_tokens": TOKENS,
            "ignore_eos": True,
            "seed": i,
            "stream": True,
            **_KINDS[i % len(_KINDS)],
        }
        for i in range(count)
    ]


@dataclass
class Streamed:
    """What one client got.

    Attributes:
        texts, reasons: By choice.
        logprobs, top_logprobs: By choice, of all tokens in their order, however many came in a chunk.
        prompt_logprobs: Of the prompt, all that were reported, in their order.
        chunks: Events with text so far.
        pause: The longest time between two events, in seconds.
        error: What went wrong.
    """

    texts: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    top_logprobs: dict[int, list[float]] = field(default_factory=dict)
    prompt_logprobs: list[float] = field(default_factory=list)
    chunks: int = 0
    pause: float = 0.0
    error: str = ""

    def take(self, event: dict[str, Any]) -> None:
        """An event of the stream."""
        if "error" in event:
            self.error = event["error"]["message"]
            return
        for choice in event["choices"]:
            index = choice["index"]
            self.texts[index] = self.texts.get(index, "") + choice["text"]
            self.chunks += bool(choice["text"])
            for position in choice.get("prompt_logprobs") or ():
                self.prompt_logprobs += [entry["logprob"] for entry in (position or {}).values()]
            if logprobs := choice.get("logprobs"):
                self.logprobs.setdefault(index, []).extend(logprobs["token_logprobs"])
                values = self.top_logprobs.setdefault(index, [])
                values += [value for top in logprobs["top_logprobs"] for value in sorted(top.values())]
            if choice["finish_reason"]:
                self.reasons[index] = choice["finish_reason"]

    @property
    def outcome(self) -> tuple[Any, ...]:
        """What must not depend on what happens to the server; log probabilities besides, see `rounding_error`."""
        lengths = [
            {index: len(values) for index, values in kind.items()} for kind in (self.logprobs, self.top_logprobs)
        ]
        return self.texts, self.reasons, self.error, lengths, len(self.prompt_logprobs)

    def rounding_error(self, other: Streamed) -> float:
        """How far the log probabilities of two equal outcomes are apart at most."""
        pairs = [(self.prompt_logprobs, other.prompt_logprobs)]
        pairs += [(values, other.logprobs[index]) for index, values in self.logprobs.items()]
        pairs += [(values, other.top_logprobs[index]) for index, values in self.top_logprobs.items()]
        return max((abs(a - b) for own, others in pairs for a, b in zip(own, others, strict=True)), default=0.0)


def run(url: str, requests: list[dict[str, Any]], disturb: Callable[[], None] | None = None) -> list[Streamed]:
    """Streams all of them at once; once three in four have text, something is done to the server."""
    results = [Streamed() for _ in requests]

    async def one(client: httpx.AsyncClient, body: dict[str, Any], result: Streamed) -> None:
        try:
            async with client.stream("POST", url + "/v1/completions", json=body) as answer:
                if answer.status_code != httpx.codes.OK:
                    result.error = json.loads(await answer.aread())["error"]["message"]
                    return
                if not body["stream"]:
                    result.take(json.loads(await answer.aread()))
                    return
                last = time.monotonic()
                async for line in answer.aiter_lines():
                    if line.startswith("data: ") and line != "data: [DONE]":
                        result.pause = max(result.pause, time.monotonic() - last)
                        last = time.monotonic()
                        result.take(json.loads(line[6:]))
        except httpx.TransportError as error:
            result.error = f"{type(error).__name__}: {error}"

    async def disturb_in_time(do: Callable[[], None], begun: asyncio.Event) -> None:
        while sum(result.chunks >= 3 for result in results) < 0.75 * len(results):
            await asyncio.sleep(0.01)
        begun.set()
        await asyncio.to_thread(do)

    async def everything() -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=300, limits=limits) as client:
            streams = [one(client, body, result) for body, result in zip(requests, results, strict=True)]
            if disturb is None:
                await asyncio.gather(*streams)
                return
            begun = asyncio.Event()
            disturbing = asyncio.create_task(disturb_in_time(disturb, begun))
            await asyncio.gather(*streams)
            assert begun.is_set(), "the streams ended before three in four had text"
            await disturbing

    asyncio.run(everything())
    return results
