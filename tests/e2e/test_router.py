"""Three servers behind `quire route` under 200 clients, one killed, one drained: what has not begun is not lost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from tests.e2e.serve import QuireServe

CLIENTS = 200
TOKENS = 40
PHASE_ANSWERS = 250
"""Before the kill, between it and the drain, and after that."""
SEVERAL = 5
WAIT_S = 240.0


@dataclass
class Outcomes:
    """What became of the requests.

    Attributes:
        answered: Completely.
        cut: Streams that broke off after they had begun.
        lost: What happened to the others.
    """

    answered: int = 0
    cut: int = 0
    lost: list[str] = field(default_factory=list)


@contextlib.contextmanager
def servers(folder: Path) -> Iterator[list[tuple[str, subprocess.Popen[str]]]]:
    """Three of them, with their addresses."""
    command = [sys.executable, "-m", "tests.router.scripted_server"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    processes = []
    for name in "abc":
        (folder / name).mkdir()
        processes.append(subprocess.Popen([*command, str(folder / name)], text=True, **pipes))  # type: ignore[call-overload]
    try:
        yield [(process.stdout.readline().strip(), process) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


async def client(http: httpx.AsyncClient, number: int, over: asyncio.Event, outcomes: Outcomes) -> None:
    """One request after the other; every other one is a stream."""
    while not over.is_set():
        body = {"model": "tiny", "prompt": chr(97 + number % 26), "max_tokens": TOKENS, "ignore_eos": True}
        begun = False
        try:
            async with http.stream("POST", "/v1/completions", json=body | {"stream": bool(number % 2)}) as answer:
                text = ""
                async for part in answer.aiter_text():
                    begun, text = True, text + part
            if answer.status_code != 200:
                outcomes.lost.append(f"{answer.status_code}: {text[:200]}")
            elif not text.endswith("data: [DONE]\n\n" if number % 2 else "}"):
                outcomes.lost.append(f"not whole: {text[-200:]}")
            else:
                outcomes.answered += 1
        except httpx.HTTPError as error:
            if begun:
                outcomes.cut += 1
            else:
                outcomes.lost.append(f"{type(error).__name__}: {error}")


@contextlib.asynccontextmanager
async def load(url: str, outcomes: Outcomes) -> AsyncIterator[None]:
    """All clients, until it is over; then each ends its request."""
    over = asyncio.Event()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=WAIT_S, limits=limits) as http, asyncio.TaskGroup() as tasks:
        for number in range(CLIENTS):
            tasks.create_task(client(http, number, over, outcomes))
        try:
            yield
        finally:
            over.set()


async def answers(outcomes: Outcomes, more: int = PHASE_ANSWERS) -> None:
    """Until so many more requests were answered."""
    until = outcomes.answered + more
    async with asyncio.timeout(WAIT_S):
        while outcomes.answered < until:
            await asyncio.sleep(0.02)


async def states(url: str) -> dict[str, dict[str, object]]:
    async with httpx.AsyncClient(timeout=WAIT_S) as http:
        return {each["url"]: each for each in (await http.get(url + "/backends")).json()["backends"]}


async def some_open(router: str, server: str) -> int:
    """How many requests a server has, once it has several."""
    async with asyncio.timeout(WAIT_S):
        while (found := int(str((await states(router))[server]["requests"]))) < SEVERAL:
            await asyncio.sleep(0.01)
    return found


@pytest.mark.long("operations")
def test_a_killed_and_a_drained_server_cost_no_request_that_had_not_begun(tmp_path: Path) -> None:
    outcomes, listed = Outcomes(), tmp_path / "list.yaml"

    def write_list(draining: str = "") -> None:
        new = listed.with_suffix(".new")
        new.write_text(json.dumps({"backends": [{"url": url, "drain": url == draining} for url, _ in three]}))
        new.replace(listed)

    async def check(router: str) -> tuple[int, int]:
        async with asyncio.timeout(WAIT_S):
            while not all(state["ready"] for state in (await states(router)).values()):
                await asyncio.sleep(0.1)
        (killed, process), (drained, _), (left, _) = three
        async with load(router, outcomes):
            await answers(outcomes)
            await some_open(router, killed)
            process.send_signal(signal.SIGSTOP)  # no stream begins or ends there while they are counted
            open_then = await some_open(router, killed)
            process.kill()
            await answers(outcomes)
            cut = outcomes.cut
            write_list(draining=drained)
            async with asyncio.timeout(WAIT_S):
                while (await states(router))[drained]["requests"] or not (await states(router))[drained]["draining"]:
                    await asyncio.sleep(0.05)
            await answers(outcomes)
            now = await states(router)
            assert not now[killed]["ready"]
            assert now[drained]["requests"] == 0
            assert now[left]["requests"]
        return open_then, cut

    with servers(tmp_path) as three:
        write_list()
        command = ("quire.cli.main", "route")
        flags = ("--dynamic-config-yaml", str(listed), "--host", "127.0.0.1", "--port", "0")
        with QuireServe(*flags, "--disable-uvicorn-access-log", command=command) as router:
            open_then, cut = asyncio.run(check(router.wait_ready().url))
            router.signal()
            assert router.wait() == 0
    print(
        f"{outcomes.answered} answered; {open_then} at the killed server, of which {outcomes.cut} streams were cut off"
    )
    assert outcomes.lost == []
    assert outcomes.cut == cut <= open_then, "no stream of the drained server"
    assert outcomes.answered >= 3 * PHASE_ANSWERS
