"""Models are swapped under load over real HTTP: no request is lost, each answer is one model's, nothing is left."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import httpx
import pytest

from quire import builtin
from tests.e2e.process_usage import Usage, usage
from tests.e2e.serve import QuireServe

SWAPS, STREAMS = 12, 32
WARM_SWAPS = 4
"""Until then allocators grow."""
CALM_S = 2.0
"""In which a server sees that its clients have gone."""
THINK_S = 0.1
"""Between two answers of a stream: the engines that start need some of the processors."""
MIB = 2**20
MODELS = {name: str(builtin.path(name)) for name in builtin.MODELS}
PROMPTS = ("Once upon a time", "The capital of France is", "def add(a, b):", "Hello")
ARGUMENTS = (
    "--port", "0", "--device", "cpu", "--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", str(STREAMS),
    "--model", MODELS["quill"], "--served-model-name", "quill", "--api-key", "a key", "--disable-uvicorn-access-log",
    "--no-enable-prefix-caching",
)  # fmt: skip
HEADERS = {"Authorization": "Bearer a key"}


class Load:
    """Streams that follow one another, and what they got.

    Attributes:
        lost: What went wrong, a line each.
        answered: By model.
        texts: What a model has answered to a prompt.
        longest_wait_s: For a first token.
    """

    def __init__(self, url: str) -> None:
        self.lost: list[str] = []
        self.answered: Counter[str] = Counter()
        self.texts: dict[tuple[str, str], set[str]] = {}
        self.longest_wait_s = 0.0
        self._url = url
        self._ends = False

    @asynccontextmanager
    async def running(self, client: httpx.AsyncClient) -> Any:
        """While it goes on; the last streams are read to their ends."""
        self._ends = False
        streams = [asyncio.create_task(self._ask_again_and_again(client, number)) for number in range(STREAMS)]
        try:
            yield
        finally:
            self._ends = True
            await asyncio.gather(*streams)

    async def _ask_again_and_again(self, client: httpx.AsyncClient, number: int) -> None:
        while not self._ends:
            prompt = PROMPTS[number % len(PROMPTS)]
            number += 1
            await asyncio.sleep(THINK_S)
            try:
                await self._ask(client, prompt)
            except Exception as error:
                self.lost.append(f"{prompt}: {error!r}")

    async def _ask(self, client: httpx.AsyncClient, prompt: str) -> None:
        body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True, "stream": True}
        began, names, text, ends = time.monotonic(), set[str](), "", 0
        async with client.stream("POST", f"{self._url}/v1/completions", json=body) as response:
            if response.status_code != 200:
                raise AssertionError(f"{response.status_code}: {await response.aread()!r}")
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    ends += line == "data: [DONE]"
                    continue
                chunk = json.loads(line[6:])
                if not text:
                    self.longest_wait_s = max(self.longest_wait_s, time.monotonic() - began)
                names.add(chunk["model"])  # an error event has none: KeyError
                text += chunk["choices"][0]["text"]
        if len(names) != 1 or ends != 1:
            raise AssertionError(f"models {names}, {ends} ends")
        (model,) = names
        self.answered[model] += 1
        self.texts.setdefault((model, prompt), set()).add(text)


@pytest.mark.long("operations")
def test_swaps_under_load_lose_nothing_and_leave_nothing() -> None:
    with serving() as server:
        asyncio.run(_swap_under_load(server))
        server.signal()
        assert server.wait() == 0


@contextmanager
def serving() -> Iterator[QuireServe]:
    with QuireServe(*ARGUMENTS) as server:
        yield server.wait_ready()


async def _swap_under_load(server: QuireServe) -> None:
    load, taken, swaps = Load(server.url), list[dict[str, Usage]](), list[dict[str, Any]]()
    async with _client() as client:
        whole = {name: await _answers_alone(client, server, name) for name in ("quill_draft", "quill")}

    async def swap_under_load(count: int) -> None:
        async with _client() as client, load.running(client):
            for number in range(len(swaps), len(swaps) + count):
                name = ("quill_draft", "quill")[number % 2]
                swaps.append(await _swap(client, server, name, "after" if number % 3 == 2 else "auto"))
                await asyncio.sleep(0.5)
                await _one_engine(server)
                taken.append(usage(server.process.pid))

    await swap_under_load(WARM_SWAPS)
    await asyncio.sleep(CALM_S)  # how many connections are open under load depends on who is how fast
    warm = usage(server.process.pid)
    await swap_under_load(SWAPS - WARM_SWAPS)
    deadline = time.monotonic() + 60
    while _holds_more(last := usage(server.process.pid), warm) and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
    _print(load, swaps, [*taken, warm, last])
    assert load.lost == []
    assert all(load.answered[name] for name in MODELS)
    for (model, prompt), texts in load.texts.items():
        assert texts == {whole[model][prompt]}, f"{model} answers {prompt!r} in another way beside others"
    assert [swap["phase"] for swap in swaps] == ["done"] * SWAPS
    assert not _holds_more(last, warm), (warm, last)
    for process in ("api", "supervisor"):
        assert last[process].rss <= warm[process].rss + 12 * MIB
    assert last["engine"].processes == 1


def _client() -> httpx.AsyncClient:
    return httpx.AsyncClient(timeout=120, headers=HEADERS, limits=httpx.Limits(max_connections=STREAMS + 8))


def _holds_more(now: dict[str, Usage], before: dict[str, Usage]) -> bool:
    """Whether one of the processes that stay does."""
    return any(
        now[process].fds > before[process].fds + 2 or now[process].threads > before[process].threads + 2
        for process in ("api", "supervisor")
    )


async def _one_engine(server: QuireServe) -> None:
    """Until the engine of the model before is gone."""
    deadline = time.monotonic() + 60
    while len(server.all_children().get("engine", ())) != 1:
        assert time.monotonic() < deadline, server.all_children()
        await asyncio.sleep(0.05)


async def _answers_alone(client: httpx.AsyncClient, server: QuireServe, name: str) -> dict[str, str]:
    """What a model answers when nobody else asks."""
    await _swap(client, server, name, "beside")
    load = Load(server.url)
    for prompt in PROMPTS:
        await load._ask(client, prompt)
    assert load.answered == {name: len(PROMPTS)}
    return {prompt: "".join(load.texts[name, prompt]) for prompt in PROMPTS}


async def _swap(client: httpx.AsyncClient, server: QuireServe, name: str, mode: str) -> dict[str, Any]:
    body = {"model": MODELS[name], "served_model_name": name, "mode": mode, "wait": True}
    answer = await client.post(f"{server.url}/admin/model", json=body)
    assert answer.status_code == 200, answer.text
    document: dict[str, Any] = answer.json()
    assert document["model"] == name, document
    swap: dict[str, Any] = document["swap"]
    return swap


def _print(load: Load, swaps: list[dict[str, Any]], taken: list[dict[str, Usage]]) -> None:
    seconds = [f"{swap['mode']} {swap['seconds']}" for swap in swaps]
    print(f"\n{len(swaps)} swaps, seconds: {', '.join(seconds)}")
    print(
        f"{load.answered.total()} streams answered ({dict(load.answered)}), {len(load.lost)} lost; the longest wait ",
        end="",
    )
    print(f"for a first token {load.longest_wait_s:.1f} s")
    for process in ("api", "supervisor"):
        rss = [f"{each[process].rss / MIB:.0f}" for each in taken]
        fds = [str(each[process].fds) for each in taken]
        print(f"{process}: MiB {' '.join(rss)}; descriptors {' '.join(fds)}")
