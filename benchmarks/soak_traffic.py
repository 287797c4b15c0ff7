"""Clients that ask a server for all kinds of things, of which some end badly: the traffic of `benchmarks.soak`."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import httpx

from tests.api.wrong_requests import WRONG_REQUESTS

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LONG_PROMPT = 1_900
"""Tokens; Quill's context has 2,048."""
SCHEMAS = 400
"""So many different ones are asked for: the engine keeps 256 compiled, the API process verdicts on all."""
STORED = 1_000
"""Responses that fill the page cache of the database they are stored in."""
MAX_COMPLAINTS = 20
_WRONG = [wrong for wrong in WRONG_REQUESTS if len(wrong.body) < 2**16]
_QUESTIONS = ("What is a river?", "Tell me about the sea.", "Count to ten.", "What is the weather like in Oslo?")
_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
_STARTS = ("Once upon a time", "The quick brown fox", "In the middle of the night", "A list of numbers:")


@dataclass(frozen=True)
class Answer:
    """How a request ended.

    Attributes:
        status: Of the answer; 0 if its client has left, 500 for an error inside of a stream.
        text: What it says, if it is an error.
    """

    status: int
    text: str = ""

    @classmethod
    def of(cls, response: httpx.Response) -> Answer:
        """One that was read."""
        return cls(response.status_code, "" if response.is_success else response.text)


LEFT = Answer(0)


class SoakTraffic:
    """Requests of all kinds.

    Args:
        url: The server's.
        clients: How many ask at a time.
        seed: Of everything they ask.

    Attributes:
        answers: How many, by kind and status; 0 for one whose client has left.
        complaints: Answers that there should not have been, each text once, the first few.
    """

    def __init__(self, url: str, clients: int, seed: int = 0) -> None:
        self._url = url
        self._clients = clients
        self._rng = random.Random(seed)
        self.answers: Counter[tuple[str, int]] = Counter()
        self.complaints: list[str] = []
        self._kinds: dict[str, Callable[[httpx.AsyncClient], Awaitable[Answer]]] = {
            "stream": self._stream,
            "chat": self._chat,
            "aborted": self._aborted,
            "left early": self._left_early,
            "choices": self._choices,
            "long prompt": self._long_prompt,
            "tools": self._tools,
            "structured": self._structured,
            "beam search": self._beam_search,
            "messages": self._messages,
            "ollama": self._ollama,
            "responses": self._responses,
            "embeddings": self._embeddings,
            "reranking": self._reranking,
            "wrong": self._wrong,
            "probe": self._probe,
        }

    async def fill(self) -> None:
        """Have caches of grammars and of stored responses full from the beginning: what they take is no leak."""
        constraints = ({"structured_outputs": {"json": _schema(number)}} for number in range(SCHEMAS))
        asked = [(COMPLETIONS, {"prompt": "A list", "max_tokens": 2, **constraint}) for constraint in constraints]
        asked += [("/v1/responses", {"input": "The sea", "max_output_tokens": 2, "store": True})] * STORED
        left = iter(asked)

        async def ask_for_each() -> None:
            async with httpx.AsyncClient(base_url=self._url, timeout=120) as client:
                for path, body in left:
                    answer = Answer.of(await client.post(path, json=body))
                    if answer.text:
                        self._complain(f"filling: {answer.text}")

        await asyncio.gather(*(ask_for_each() for _ in range(self._clients)))

    async def run(self, over: Callable[[], bool]) -> None:
        """Ask until `over` says so; then wait for what is open."""
        await asyncio.gather(*(self._client(over) for _ in range(self._clients)))

    async def _client(self, over: Callable[[], bool]) -> None:
        while not over():
            limits = httpx.Limits(max_connections=4)
            async with httpx.AsyncClient(base_url=self._url, timeout=120, limits=limits) as client:
                for _ in range(50):  # now and then connections are new
                    if over():
                        return
                    await self._ask(client)

    async def _ask(self, client: httpx.AsyncClient) -> None:
        kind = self._rng.choice(list(self._kinds))
        try:
            answer = await self._kinds[kind](client)
        except httpx.HTTPError as error:
            self._complain(f"{kind}: {type(error).__name__} {error}")
            return
        self.answers[kind, answer.status] += 1
        wanted = range(400, 500) if kind == "wrong" else (0, 200)
        if answer.status not in wanted:
            self._complain(f"{kind}: status {answer.status} {answer.text[:300]}")

    def _complain(self, text: str) -> None:
        if text not in self.complaints and len(self.complaints) < MAX_COMPLAINTS:
            self.complaints.append(text)

    # --- kinds ------------------------------------------------------------------------------------------------------

    async def _stream(self, client: httpx.AsyncClient) -> Answer:
        return await self._read(client, COMPLETIONS, self._completion() | {"max_tokens": self._rng.randint(1, 120)})

    async def _chat(self, client: httpx.AsyncClient) -> Answer:
        body = self._conversation() | {"max_tokens": 40, "stop": ["\n\n"], "frequency_penalty": 0.3}
        return Answer.of(await client.post(CHAT, json=body))

    async def _aborted(self, client: httpx.AsyncClient) -> Answer:
        """The client leaves in the middle."""
        body = self._completion() | {"max_tokens": 400, "n": self._rng.randint(1, 3), "temperature": 1}
        return await self._read(client, COMPLETIONS, body, most=self._rng.randint(1, 30))

    async def _left_early(self, client: httpx.AsyncClient) -> Answer:
        """The client leaves at any time, perhaps before its request is read."""
        body = self._completion() | {"max_tokens": 400, "stream": False}
        try:
            async with asyncio.timeout(self._rng.random() * 0.3):
                return Answer.of(await client.post(COMPLETIONS, json=body))
        except TimeoutError:
            return LEFT

    async def _choices(self, client: httpx.AsyncClient) -> Answer:
        """Several at once, which greedy sampling is refused."""
        body = self._completion() | {"max_tokens": 30, "n": 4, "logprobs": 3, "stream": False, "temperature": 1}
        return Answer.of(await client.post(COMPLETIONS, json=body))

    async def _long_prompt(self, client: httpx.AsyncClient) -> Answer:
        prompt = [self._rng.randrange(300, 4_000) for _ in range(self._rng.randint(LONG_PROMPT // 2, LONG_PROMPT))]
        body = {"prompt": prompt, "max_tokens": 20, "prompt_logprobs": self._rng.choice([None, 1])}
        return Answer.of(await client.post(COMPLETIONS, json=body))

    async def _tools(self, client: httpx.AsyncClient) -> Answer:
        choice = self._rng.choice(["auto", "required", "none"])
        body = self._conversation() | {"max_tokens": 60, "tools": [_TOOL], "tool_choice": choice, "stream": True}
        return await self._read(client, CHAT, body)

    async def _structured(self, client: httpx.AsyncClient) -> Answer:
        """One of more schemas than are kept."""
        schema = _schema(self._rng.randrange(SCHEMAS))
        body = self._conversation() | {"max_tokens": 60, "structured_outputs": {"json": schema}}
        return await self._read(client, CHAT, body | {"stream": True})

    async def _beam_search(self, client: httpx.AsyncClient) -> Answer:
        body = self._completion() | {"max_tokens": 10, "use_beam_search": True, "n": 3, "stream": False}
        return Answer.of(await client.post(COMPLETIONS, json=body | {"temperature": 0, "ignore_eos": False}))

    async def _messages(self, client: httpx.AsyncClient) -> Answer:
        body = self._conversation() | {"model": "quill", "max_tokens": 30, "stream": True}
        return await self._read(client, "/v1/messages", body)

    async def _ollama(self, client: httpx.AsyncClient) -> Answer:
        body = {"messages": self._conversation()["messages"], "model": "quill", "options": {"num_predict": 30}}
        return await self._read(client, "/api/chat", body)

    async def _responses(self, client: httpx.AsyncClient) -> Answer:
        body = {"input": self._rng.choice(_QUESTIONS), "max_output_tokens": 20, "store": self._rng.random() < 0.5}
        return Answer.of(await client.post("/v1/responses", json=body))

    async def _embeddings(self, client: httpx.AsyncClient) -> Answer:
        """Texts of all lengths, some of which are cut."""
        texts = [self._completion()["prompt"] * self._rng.choice([1, 10, 400]) for _ in range(self._rng.randint(1, 20))]
        more = self._rng.choice([{}, {"encoding_format": "base64"}])
        return Answer.of(
            await client.post("/v1/embeddings", json={"input": texts, "truncate_prompt_tokens": -1, **more})
        )

    async def _reranking(self, client: httpx.AsyncClient) -> Answer:
        documents = [self._completion()["prompt"] for _ in range(8)]
        return Answer.of(
            await client.post("/rerank", json={"query": self._rng.choice(_STARTS), "documents": documents})
        )

    async def _wrong(self, client: httpx.AsyncClient) -> Answer:
        wrong = self._rng.choice(_WRONG)
        headers = dict(wrong.headers)
        return Answer.of(await client.request(wrong.method, wrong.path, content=wrong.body, headers=headers))

    async def _probe(self, client: httpx.AsyncClient) -> Answer:
        return Answer.of(await client.get(self._rng.choice(["/metrics", "/health", "/ready", "/v1/models"])))

    # --- their parts ------------------------------------------------------------------------------------------------

    def _completion(self) -> dict[str, Any]:
        prompt = f"{self._rng.choice(_STARTS)} {self._rng.randrange(10_000)}"
        temperature = self._rng.choice([0, 1])
        return {"prompt": prompt, "ignore_eos": True, "stream": True, "temperature": temperature}

    def _conversation(self) -> dict[str, Any]:
        question = f"{self._rng.choice(_QUESTIONS)} {self._rng.randrange(10_000)}"
        return {"messages": [{"role": "user", "content": question}], "temperature": self._rng.choice([0, 0.8])}

    async def _read(self, client: httpx.AsyncClient, path: str, body: dict[str, Any], most: int = 10**9) -> Answer:
        """Read a stream's events, at most so many."""
        events = 0
        async with client.stream("POST", path, json=body) as response:
            if not response.is_success:
                await response.aread()
                return Answer.of(response)
            async for line in response.aiter_lines():
                if line.startswith("data: {") and "error" in json.loads(line[6:]):
                    return Answer(500, line)
                events += 1
                if events >= most:
                    return LEFT
        return Answer(response.status_code)


def _schema(number: int) -> dict[str, Any]:
    return {"type": "array", "items": {"enum": [f"word {number}", number]}, "maxItems": 8}
