"""A real server under load: 64 at once, 200 that hang up, wrong requests beside a healthy stream; then all is free."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.api.wrong_requests import WRONG_REQUESTS, WrongRequest
from tests.checkpoints import make_llama
from tests.e2e.serve import QuireServe, stream_lines

GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[QuireServe]:
    checkpoint = make_llama(tmp_path_factory.mktemp("llama") / "model")
    # 60 blocks hold few of the longer sequences: 64 at once are preempted over and over
    limits = ("--num-gpu-blocks-override", "60", "--max-num-seqs", "32")
    arguments = ("--port", "0", "--served-model-name", "tiny", *limits)
    with QuireServe(str(checkpoint), *arguments, environment={"QUIRE_SERVER_DEV_MODE": "1"}) as server:
        yield server.wait_ready()


def assert_all_free(server: QuireServe, tasks: int) -> None:
    """Every block, slot, stream and task is free within a moment."""
    deadline = time.monotonic() + 60
    while True:
        counts = server.counts()
        engine, api = counts["engine"], counts["api"]
        free = (
            engine["free_blocks"] == engine["blocks"]
            and engine["free_slots"] == engine["slots"]
            and engine["requests"] == engine["in_flight"] == 0
            and api["streams"] == api["sequences"] == 0
            and api["tasks"] <= tasks
        )
        if free:
            return
        assert time.monotonic() < deadline, counts
        time.sleep(0.05)


@pytest.fixture
def idle_tasks(server: QuireServe) -> int:
    assert_all_free(server, 1_000)
    return int(server.counts()["api"]["tasks"])


def bodies(count: int) -> list[dict[str, Any]]:
    rng = random.Random(11)
    return [
        GREEDY | {
            "prompt": [rng.randrange(3, 320) for _ in range(rng.randint(1, 150))],
            "max_tokens": rng.randint(1, 60),
            "logprobs": rng.choice([None, 3]),
        }
        for _ in range(count)
    ]  # fmt: skip


def text_of(lines: list[str]) -> str:
    return "".join(json.loads(line)["choices"][0]["text"] for line in lines if line != "[DONE]")


def test_64_at_once_get_what_each_gets_alone(server: QuireServe, idle_tasks: int) -> None:
    wanted = bodies(64)
    alone = [server.post("/v1/completions", body).json()["choices"][0]["text"] for body in wanted]

    async def all_at_once() -> list[str]:
        async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=None)) as client:

            async def one(index: int, body: dict[str, Any]) -> str:
                if index % 2:
                    answer = await client.post(server.url + "/v1/completions", json=body)
                    return str(answer.json()["choices"][0]["text"])
                lines = []
                async with client.stream("POST", server.url + "/v1/completions", json=body | {"stream": True}) as got:
                    async for line in got.aiter_lines():
                        if line.startswith("data: "):
                            lines.append(line[6:])
                return text_of(lines)

            # Nobody is served until all are there: a fast server would be done with the first by then.
            await client.post(server.url + "/pause", params={"mode": "keep"})
            asked = [asyncio.create_task(one(i, body)) for i, body in enumerate(wanted)]
            while (await asyncio.to_thread(server.counts))["api"]["sequences"] < len(wanted):
                await asyncio.sleep(0.02)
            await client.post(server.url + "/resume")
            return await asyncio.gather(*asked)

    before = server.counts()["engine"]["preemptions"]
    assert asyncio.run(all_at_once()) == alone
    assert server.counts()["engine"]["preemptions"] > before
    assert_all_free(server, idle_tasks)


def test_200_clients_that_hang_up_leave_nothing_behind(server: QuireServe, idle_tasks: int) -> None:
    rng = random.Random(5)

    async def hang_up(client: httpx.AsyncClient, number: int) -> None:
        body = {"prompt": "the quick brown fox", "max_tokens": 300, "ignore_eos": True, "stream": number % 4 != 0,
                "n": 1 + number % 3, "temperature": 0.9}  # fmt: skip
        try:
            async with asyncio.timeout(0.02 + rng.random() * 0.4):
                async with client.stream("POST", server.url + "/v1/completions", json=body) as answer:
                    async for _ in answer.aiter_lines():
                        if rng.random() < 0.05:
                            return
        except (TimeoutError, httpx.TransportError):
            return

    async def storm() -> None:
        async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=40)) as client:
            for start in range(0, 200, 40):
                await asyncio.gather(*(hang_up(client, start + i) for i in range(40)))

    asyncio.run(storm())
    assert_all_free(server, idle_tasks)
    body = GREEDY | {"prompt": "the quick", "max_tokens": 5}
    assert server.post("/v1/completions", body).json()["usage"]["completion_tokens"] == 5


def test_wrong_requests_get_their_answer_and_disturb_nobody(server: QuireServe, idle_tasks: int) -> None:
    body = GREEDY | {"prompt": "the quick brown", "max_tokens": 400}
    undisturbed = text_of(list(stream_lines(server.url + "/v1/completions", body)))
    failures: list[str] = []
    with (
        httpx.Client(timeout=60) as other,
        httpx.stream("POST", server.url + "/v1/completions", json=body | {"stream": True}, timeout=60) as healthy,
    ):
        events = (line[6:] for line in healthy.iter_lines() if line.startswith("data: "))
        lines = [next(events)]
        for request in WRONG_REQUESTS:
            failures += check(server, other, request)
            lines += itertools.islice(events, 1)
        lines += events
    assert failures == []
    assert text_of(lines) == undisturbed
    assert_all_free(server, idle_tasks)


def check(server: QuireServe, client: httpx.Client, wrong: WrongRequest) -> list[str]:
    """What is wrong with the answer to a wrong request."""
    headers = dict(wrong.headers)
    answer = client.request(wrong.method, server.url + wrong.path, content=wrong.body, headers=headers)
    if answer.status_code == wrong.status and wrong.matches(answer.json()["error"]["message"]):
        return []
    return [f"{wrong.name}: {answer.status_code} {answer.text[:200]}"]
