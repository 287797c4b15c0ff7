"""Two servers behind a load balancer that follows `/ready`, restarted in turn under requests: whether any is lost.

    python -m benchmarks.rolling_restarts --restarts 50 [flags of quire serve]

The load balancer asks each server every 0.1 s, and never sends a request twice. Clients stream or wait for whole
answers; one that is not answered completely, or otherwise than with 200, is lost.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from dataclasses import dataclass, field

import httpx

from tests.e2e.ready_proxy import ReadyProxy
from tests.e2e.serve import QuireServe

CLIENTS = 8
TOKENS = 100
SHUTDOWN_DELAY_S = 2.0
"""What the servers get as --shutdown-delay: many times what the load balancer needs to notice."""


@dataclass
class Rolling:
    """What became of the requests.

    Attributes:
        answered: How many were.
        lost: What happened to the others.
        exit_codes: Of the servers that were told to end.
        restart_s: How long each restart took, from the signal until the next server was ready.
    """

    answered: int = 0
    lost: list[str] = field(default_factory=list)
    exit_codes: list[int] = field(default_factory=list)
    restart_s: list[float] = field(default_factory=list)


async def rolling_restarts(restarts: int, *flags: str) -> Rolling:
    """Restart servers so many times under requests."""
    rolling, over = Rolling(), asyncio.Event()
    arguments = ("--port", "0", "--shutdown-delay", str(SHUTDOWN_DELAY_S), *flags)
    async with ReadyProxy() as proxy:
        servers = {name: QuireServe(*arguments) for name in ("a", "b")}
        try:
            for name, server in servers.items():
                await _add(proxy, name, server)
            async with asyncio.TaskGroup() as tasks:
                for number in range(CLIENTS):
                    tasks.create_task(_client(proxy.url, number, over, rolling))
                for number in range(restarts):
                    name = "ab"[number % 2]
                    await _restart(proxy, name, servers, arguments, rolling)
                over.set()
        finally:
            for server in servers.values():
                server.__exit__()
    return rolling


async def _restart(
    proxy: ReadyProxy, name: str, servers: dict[str, QuireServe], arguments: tuple[str, ...], rolling: Rolling
) -> None:
    begin = time.monotonic()
    servers[name].signal()
    rolling.exit_codes.append(await asyncio.to_thread(servers[name].wait, 60))
    servers[name].__exit__()
    servers[name] = QuireServe(*arguments)
    await _add(proxy, name, servers[name])
    rolling.restart_s.append(time.monotonic() - begin)


async def _add(proxy: ReadyProxy, name: str, server: QuireServe) -> None:
    await asyncio.to_thread(server.wait_ready)
    proxy.add(name, server.url)
    await proxy.wait_ready(name)


async def _client(url: str, number: int, over: asyncio.Event, rolling: Rolling) -> None:
    """One request after the other, each on a connection of its own."""
    body = {"prompt": f"{number}: once upon a time", "max_tokens": TOKENS, "ignore_eos": True, "seed": number}
    limits = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        while not over.is_set():
            try:
                error = await (_stream(client, body) if number % 2 else _whole(client, body))
            except httpx.HTTPError as broken:
                error = f"{type(broken).__name__}: {broken}"
            if error:
                rolling.lost.append(error)
                await asyncio.sleep(0.1)  # do not fill the report with one failure
            else:
                rolling.answered += 1


async def _whole(client: httpx.AsyncClient, body: dict[str, object]) -> str:
    """What is wrong with the answer."""
    answer = await client.post("/v1/completions", json=body)
    if answer.status_code != 200:
        return f"status {answer.status_code}: {answer.text[:200]}"
    tokens = answer.json()["usage"]["completion_tokens"]
    return "" if tokens == TOKENS else f"{tokens} of {TOKENS} tokens"


async def _stream(client: httpx.AsyncClient, body: dict[str, object]) -> str:
    events = []
    options = {"stream": True, "stream_options": {"include_usage": True}}
    async with client.stream("POST", "/v1/completions", json=body | options) as answer:
        if answer.status_code != 200:
            return f"status {answer.status_code}: {(await answer.aread())[:200]!r}"
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                events.append(line[6:])
    if events[-1:] != ["[DONE]"]:
        return f"a stream ended after {len(events)} events"
    usage = json.loads(events[-2]).get("usage") or {}
    return "" if usage.get("completion_tokens") == TOKENS else f"a stream ended with {events[-2][:200]}"


def main() -> int:
    """From the command line; 1 if a request was lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--restarts", type=int, default=50)
    arguments, flags = parser.parse_known_args()
    rolling = asyncio.run(rolling_restarts(arguments.restarts, *flags))
    print(f"{rolling.answered} requests answered over {len(rolling.restart_s)} restarts, {len(rolling.lost)} lost")
    print(*rolling.lost[:10], sep="\n")
    print(f"a restart took up to {max(rolling.restart_s):.1f} s; exit codes {sorted(set(rolling.exit_codes))}")
    return bool(rolling.lost)


if __name__ == "__main__":
    sys.exit(main())
