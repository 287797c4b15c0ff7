"""The poison corpus beside 16 healthy streams: each poison gets its answer, and the streams notice nothing."""

from __future__ import annotations

import asyncio
import json
import queue
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import httpx
import pytest

from quire import builtin
from tests.e2e.machine_share import MachineShare
from tests.e2e.poison import CORPUS
from tests.e2e.poison.poison import CHAT, COMPLETIONS, Poison
from tests.e2e.poison.sender import send
from tests.e2e.serve import QuireServe

SENDERS = 4
STALL_S, BUSY_STALL_S = 1.0, 5.0
"""Longest wait of a stream for its next token, without the time that others take; the second where others take more
than BUSY of the machine: processes of low priority then run in time that would have been the engine's."""
BUSY = 0.25
SHORT_S = 0.1
LONGEST_CALLBACK_S, LONGEST_TURN_S = 0.04, 0.1
"""Processor time. 20 ms is the aim; a machine that is shared takes up to three times as long for the same work."""
GROWTH_MB = 600
"""Of the API process and of the engine's, behind all of the corpus."""
QUESTION = [{"role": "user", "content": "Tell me about rivers."}]
HEALTHY: list[tuple[str, dict[str, Any]]] = [
    *((COMPLETIONS, {"prompt": f"The number {i} is", "max_tokens": 60 + i, "temperature": 0}) for i in range(6)),
    *((COMPLETIONS, {"prompt": "Once upon a time", "max_tokens": 60, "seed": i, "temperature": 1}) for i in range(4)),
    *((CHAT, {"messages": QUESTION, "max_tokens": 60, "seed": i, "top_p": 0.9}) for i in range(3)),
    (COMPLETIONS, {"prompt": "The sea", "max_tokens": 50, "logprobs": 3, "temperature": 0}),
    (COMPLETIONS, {"prompt": "The sea", "max_tokens": 50, "n": 2, "seed": 5, "temperature": 1}),
    (COMPLETIONS, {"prompt": "The sea", "max_tokens": 50, "guided_regex": "[a-z ]{40,80}", "seed": 5}),
]
ALWAYS = {"stream": True, "ignore_eos": True, "return_token_ids": True}  # so that each token is a chunk


@dataclass
class Lateness:
    """What is not the server's doing: how late this process itself runs, and what other processes take."""

    worst: list[tuple[float, float]] = field(default_factory=list)  # when, and by how much
    machine: MachineShare = field(default_factory=MachineShare)

    async def watch(self) -> None:
        while True:
            begun = time.monotonic()
            self.machine.sample()
            await asyncio.sleep(0.02)
            if (late := time.monotonic() - begun - 0.02) > 0.05:
                self.worst.append((begun, late))

    def between(self, begin: float, end: float) -> float:
        """All of it in this time."""
        late = sum(late for when, late in self.worst if begin - late <= when <= end)
        return max(late, self.machine.lost(begin, end))


class Wait(NamedTuple):
    """Between two tokens of a stream.

    Attributes:
        stream: Its place among HEALTHY.
        choice: Which of its choices had to wait, also for its first token, since the first of any choice came.
        beside: The poisons that were under way.
    """

    stream: int
    choice: int
    begin: float
    end: float
    beside: list[str]


@dataclass
class Streams:
    """What healthy streams said, and how long each kept its reader waiting."""

    url: str
    lateness: Lateness = field(default_factory=Lateness)
    waits: list[Wait] = field(default_factory=list)  # judged at the end: a wait may end before its lateness is known
    under_way: set[str] = field(default_factory=set)  # poisons
    read: int = 0

    async def all(self, client: httpx.AsyncClient) -> list[str]:
        """Each stream once, side by side."""
        return await asyncio.gather(*(self.one(client, i) for i in range(len(HEALTHY))))

    async def one(self, client: httpx.AsyncClient, index: int) -> str:
        """A stream's choices, without what differs between two answers."""
        path, body = HEALTHY[index]
        said, last = [], dict[int, float]()
        async with client.stream("POST", self.url + path, json=body | ALWAYS) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                now = time.monotonic()
                said.append(json.loads(line[6:])["choices"])
                last = last or dict.fromkeys(range(body.get("n", 1)), now)
                for choice in (each["index"] for each in said[-1]):
                    if now - last[choice] > SHORT_S:
                        self.waits.append(Wait(index, choice, last[choice], now, sorted(self.under_way)))
                    last[choice] = now
        self.read += 1
        return _merged(said)

    @property
    def longest_s(self) -> float:
        """Of all waits, without what is not the server's doing."""
        return max(
            (wait.end - wait.begin - self.lateness.between(wait.begin, wait.end) for wait in self.waits), default=0.0
        )

    def stalls(self, longest_s: float) -> list[str]:
        """The waits that took longer."""
        found = []
        for wait in self.waits:
            late = self.lateness.between(wait.begin, wait.end)
            if wait.end - wait.begin - late > longest_s:
                found.append(
                    f"{wait.end - wait.begin:.2f} s, {late:.2f} of it not the server's, stream {wait.stream}, choice "
                    f"{wait.choice}, beside {wait.beside}"
                )
        return found


def _merged(said: list[list[dict[str, Any]]]) -> str:
    """Texts, tokens, log probabilities and ends by choice: how they are cut into chunks depends on timing."""
    choices: dict[int, list[Any]] = {}
    for choice in (choice for chunk in said for choice in chunk):
        text, tokens, logprobs, ends = choices.setdefault(choice["index"], ["", [], [], []])
        tokens += choice.get("token_ids") or []
        text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
        logprobs += (choice.get("logprobs") or {}).get("token_logprobs", [])
        ends += [choice["finish_reason"]] * (choice["finish_reason"] is not None)
        choices[choice["index"]] = [text, tokens, logprobs, ends]
    return json.dumps(choices, sort_keys=True)


class Poisoning(threading.Thread):
    """Sends what is left of the corpus."""

    def __init__(self, streams: Streams, left: queue.SimpleQueue[tuple[Poison, bytes]], failures: list[str]) -> None:
        super().__init__(daemon=True)
        self._streams, self._left, self._failures = streams, left, failures

    def run(self) -> None:
        while True:
            try:
                poison, body = self._left.get_nowait()
            except queue.Empty:
                return
            self._streams.under_way.add(poison.name)
            try:
                status, wrong = send(self._streams.url, poison, body)
            except Exception as error:
                status, wrong = -1, repr(error)
            self._streams.under_way.discard(poison.name)
            if status not in poison.allowed or wrong:
                self._failures.append(f"{poison.name}: {status}, not {poison.allowed}. {wrong}")


@pytest.fixture(scope="module")
def server() -> Iterator[QuireServe]:
    arguments = ("--port", "0", "--dtype", "float32", "--served-model-name", "quill", "--max-queue-time", "3600")
    developer = {"QUIRE_SERVER_DEV_MODE": "1"}
    with QuireServe(str(builtin.path("quill")), *arguments, environment=developer) as server:
        yield server.wait_ready()


def resident_mb(pid: int) -> int:
    with open(f"/proc/{pid}/status") as status:
        return int(re.search(r"VmRSS:\s+(\d+)", status.read())[1]) // 1024  # type: ignore[index]


def longest(page: str, name: str) -> float:
    return float(re.search(rf"^quire:longest_{name}_cpu_seconds\{{.*\}} (\S+)$", page, re.M)[1])  # type: ignore[index]


def wait_free(server: QuireServe) -> dict[str, Any]:
    """What is held once all is over."""
    deadline = time.monotonic() + 30
    while True:
        counts = server.counts()
        engine, api = counts["engine"], counts["api"]
        if api["sequences"] == api["streams"] == engine["requests"] == 0 and engine["free_blocks"] == engine["blocks"]:
            return counts
        assert time.monotonic() < deadline, counts
        time.sleep(0.1)


async def beside_poison(streams: Streams, expected: list[str], senders: list[Poisoning]) -> list[str]:
    """Read the healthy streams over and over until the corpus is sent; returns those that said something else."""
    different = []
    async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=None)) as client:

        async def keep_reading(index: int) -> None:
            while any(sender.is_alive() for sender in senders):
                said = await streams.one(client, index)
                if said != expected[index]:
                    different.append(f"stream {index}: {said}, not {expected[index]}")

        watching = asyncio.create_task(streams.lateness.watch())
        for sender in senders:
            sender.start()
        await asyncio.gather(*(keep_reading(index) for index in range(len(HEALTHY))))
        watching.cancel()
    return different


async def undisturbed(streams: Streams) -> list[str]:
    """What the streams say without poison, three times the same."""
    async with httpx.AsyncClient(timeout=120) as client:
        watching = asyncio.create_task(streams.lateness.watch())
        said = await streams.all(client)
        assert await streams.all(client) == said
        assert await streams.all(client) == said
        watching.cancel()
        return said


@pytest.mark.long("reliability")
def test_every_poison_gets_its_answer_and_16_streams_notice_nothing(server: QuireServe) -> None:
    quiet = Streams(server.url)
    expected = asyncio.run(undisturbed(quiet))
    processes, free = server.children(), wait_free(server)
    before = {name: resident_mb(pid) for name, pid in processes.items()}
    left: queue.SimpleQueue[tuple[Poison, bytes]] = queue.SimpleQueue()
    for poison in CORPUS:
        left.put((poison, poison.body()))  # made before, as making JSON takes cores as well
    failures: list[str] = []
    streams = Streams(server.url)
    senders = [Poisoning(streams, left, failures) for _ in range(SENDERS)]
    begun = time.monotonic()
    different = asyncio.run(beside_poison(streams, expected, senders))
    lost = streams.lateness.machine.lost(begun, ended := time.monotonic()) / (ended - begun)
    page = httpx.get(server.url + "/metrics", timeout=30).text
    callback, turn = longest(page, "event_loop_callback"), longest(page, "engine_turn")
    after = {name: resident_mb(pid) for name, pid in processes.items()}
    print(
        f"\n{len(CORPUS)} poisons in {ended - begun:.0f} s beside {streams.read} streams; longest wait of "
        f"a stream {streams.longest_s:.2f} s ({quiet.longest_s:.2f} s without poison; others took {lost:.0%} of the "
        f"machine), callback "
        f"{callback * 1e3:.0f} ms, turn {turn * 1e3:.0f} ms; MB {before} → {after}; "
        f"{len(different)} streams said something else",
        *(line for line in server.log.splitlines() if " held the event loop " in line),
        *streams.stalls(STALL_S),
        sep="\n",
    )
    assert failures == []
    assert different == []
    assert streams.stalls(BUSY_STALL_S if lost > BUSY else STALL_S) == []
    assert streams.read >= len(HEALTHY)
    assert server.children() == processes, "a process died"
    assert callback < LONGEST_CALLBACK_S
    assert turn < LONGEST_TURN_S
    assert all(after[name] - before[name] < GROWTH_MB for name in before)
    left_over = wait_free(server)
    assert left_over["engine"]["free_slots"] == free["engine"]["free_slots"]
    assert "Traceback" not in server.log


def test_the_corpus_is_large_and_every_poison_is_another() -> None:
    names = [poison.name for poison in CORPUS]
    assert len(names) >= 300
    assert len(set(names)) == len(names)
