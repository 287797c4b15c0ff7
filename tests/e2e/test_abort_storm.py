"""A thousand clients that leave, at any moment of any kind of request: afterwards everything is as before."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.checkpoints import make_llama
from tests.e2e.process_usage import Usage, usage
from tests.e2e.serve import QuireServe
from tests.e2e.test_load import assert_all_free

pytestmark = pytest.mark.long("reliability")

ABORTS, WARM_UP, MAX_WARM_UPS, AT_ONCE = 1_000, 150, 6, 40
KINDS = 8
REGEX = "[a-z]{3,9}( [a-z]{3,9}){30,60}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[QuireServe]:
    checkpoint = make_llama(tmp_path_factory.mktemp("llama") / "model")
    # 60 blocks hold few of the longer sequences, so that some are aborted while they are preempted
    limits = ("--num-gpu-blocks-override", "60", "--max-num-seqs", "32", "--max-queued-requests", "20")
    flags = (str(checkpoint), "--port", "0", *limits, "--disable-uvicorn-access-log")
    with QuireServe(*flags, environment={"QUIRE_SERVER_DEV_MODE": "1"}) as server:
        yield server.wait_ready()


class Storm:
    """Clients that leave.

    Attributes:
        ended: How each request ended: `left`, or the status of one that was answered before.
    """

    def __init__(self, url: str, seed: int) -> None:
        self._url = url
        self._rng = random.Random(seed)
        self.ended: list[str] = []

    @property
    def left(self) -> int:
        """How many have left."""
        return self.ended.count("left")

    async def calm(self) -> None:
        """Before it: requests of all kinds that are waited for, so that whatever they need has been started."""
        async with httpx.AsyncClient(base_url=self._url, timeout=60) as client:
            bodies = [self._body(number) for number in range(2 * KINDS)]
            await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))

    async def run(self, aborts: int) -> None:
        """Until so many have left, AT_ONCE at a time. How many are answered before depends on who is how fast."""
        numbers = itertools.count()

        async def leave_again_and_again() -> None:
            async with httpx.AsyncClient(base_url=self._url, timeout=60) as client:
                while self.left < aborts:
                    await self._one(client, next(numbers))

        await asyncio.gather(*(leave_again_and_again() for _ in range(AT_ONCE)))

    async def _one(self, client: httpx.AsyncClient, number: int) -> None:
        if number % 10 == 0:
            await self._half_a_body()
            return
        events = self._rng.choice([0, 1, 1, 5, 20])  # after which it leaves
        try:
            async with asyncio.timeout(0.01 + self._rng.random() * 0.3):
                async with client.stream("POST", "/v1/completions", json=self._body(number)) as answer:
                    async for _ in answer.aiter_lines():
                        events -= 1
                        if events <= 0:
                            self.ended.append("left")
                            return
                    self.ended.append(str(answer.status_code))
        except (TimeoutError, httpx.TransportError):
            self.ended.append("left")

    def _body(self, number: int) -> dict[str, Any]:
        kinds: list[dict[str, Any]] = [
            {},
            {"n": 3},
            {"stream": False},
            {"logprobs": 3, "stream": False},
            {"structured_outputs": {"regex": REGEX}},
            {"prompt": [3 + number % 300] * 400, "prompt_logprobs": 1, "stream": False},
            {"timeout": 0.1},
            {"use_beam_search": True, "n": 2, "stream": False, "temperature": 0},
        ]
        assert len(kinds) == KINDS
        body = {"prompt": "the quick brown fox", "max_tokens": 90, "ignore_eos": True, "stream": True, "temperature": 1}
        return body | kinds[number % len(kinds)]

    async def _half_a_body(self) -> None:
        """The connection ends inside of the request."""
        parts = urlsplit(self._url)
        _, writer = await asyncio.open_connection(parts.hostname, parts.port)
        body = json.dumps(self._body(0)).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % len(body)
        writer.write(head + body[: len(body) // 2])
        await writer.drain()
        writer.close()
        self.ended.append("left")


def held_more(now: dict[str, Usage], before: dict[str, Usage]) -> list[str]:
    """Who holds more than before."""
    return [
        f"{name}: {now[name]}, before {then}"
        for name, then in before.items()
        if name not in now or now[name].fds > then.fds or now[name].threads > then.threads
    ]


def test_a_thousand_aborts_leave_nothing_behind(server: QuireServe) -> None:
    asyncio.run(Storm(server.url, seed=1).calm())
    before: dict[str, Usage] = {}
    for _ in range(MAX_WARM_UPS):  # until pools of threads and helper processes are full
        asyncio.run(Storm(server.url, seed=1).run(WARM_UP))
        assert_all_free(server, 1_000)
        time.sleep(1.0)
        warm, before = before, usage(server.process.pid)
        if warm.keys() == before.keys() and not held_more(before, warm):
            break
    tasks = server.counts()["api"]["tasks"]
    assert set(before) >= {"supervisor", "api", "engine"}
    storm = Storm(server.url, seed=2)
    asyncio.run(storm.run(ABORTS))
    print(f"{storm.left} of {len(storm.ended)} left; {server.counts()['engine']['preemptions']} preemptions; {before}")
    assert set(storm.ended) <= {"left", "200", "400", "429", "504"}
    assert_all_free(server, tasks)
    deadline = time.monotonic() + 60
    while more := held_more(usage(server.process.pid), before):
        assert time.monotonic() < deadline, more
        time.sleep(0.1)
    body = {"prompt": "the quick", "max_tokens": 5, "ignore_eos": True, "temperature": 0}
    assert server.post("/v1/completions", body).json()["usage"]["completion_tokens"] == 5
