"""What `quire route` adds to a request's time, and what it takes of a processor.

    python benchmarks/router.py [--rate 200] [--seconds 30] [--prompt-bytes 2000] [--tokens 32] [--servers 3]

Stub servers of one process answer at once: whole answers of 1 KB, and streams of an event each 5 ms. Requests arrive at
random, so many a second, through a router with three of its keys; as many are sent to the stubs directly, in turn with
these, so that whatever else the machine does meets both; before that, whole answers one by one, which wait for little
else than the processes themselves. Printed for each kind, in milliseconds: time to the first byte
directly and through the router, and what was added, as differences of percentiles; then processor time (user and
system) of the router by request. A router with nothing to do takes some too, for its questions to servers: it is
measured before, and left out.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import uvloop

ROOT = Path(__file__).resolve().parents[1]
KEYS = ("key-a", "key-b", "key-c")
GAP_S = 0.005
IDLE_S = 3.0
ONE_BY_ONE = 200
WAIT_S = 60.0
EVENT = b'data: {"choices": [{"index": 0, "text": " word", "finish_reason": null}]}\n\n'
WHOLE = json.dumps({"choices": [{"index": 0, "text": "word " * 190, "finish_reason": "length"}]}).encode()
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\n%s\r\n\r\n"
PAGES = {b"/ready": b"{}", b"/v1/models": b'{"data": [{"id": "m"}]}', b"/metrics": b"vllm:num_requests_running 1\n"}


class Stub(asyncio.Protocol):
    """A connection of a server without a model."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, end, body = self._data.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: (\d+)", head)
        if not end or len(body) < (int(length[1]) if length else 0):
            return
        self._data = b""
        path = head.split(b" ", 2)[1]
        if path not in PAGES and b'"stream": true' in body:
            self._transport.write(HEAD % (b"text/event-stream", b"transfer-encoding: chunked"))
            self._send_event(self._tokens)
            return
        answer = PAGES.get(path, WHOLE)
        self._transport.write(HEAD % (b"application/json", b"content-length: %d" % len(answer)) + answer)

    def _send_event(self, left: int) -> None:
        if self._transport.is_closing():
            return
        self._transport.write(b"%x\r\n%s\r\n" % (len(EVENT), EVENT))
        if left > 1:
            asyncio.get_running_loop().call_later(GAP_S, self._send_event, left - 1)
        else:
            self._transport.write(b"0\r\n\r\n")


async def serve_stubs(servers: int, tokens: int) -> None:
    """Print the ports, and serve until killed."""
    loop = asyncio.get_running_loop()
    listening = [await loop.create_server(lambda: Stub(tokens), "127.0.0.1", 0) for _ in range(servers)]
    print(*(server.sockets[0].getsockname()[1] for server in listening), flush=True)
    await asyncio.Event().wait()


class Asking(asyncio.Protocol):
    """A client's connection."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def ask(self, data: bytes) -> asyncio.Future[tuple[float, float]]:
        """Seconds until the first byte and until the last."""
        self._data, self._first = b"", 0.0
        self._done = asyncio.get_running_loop().create_future()
        self._began = time.perf_counter()
        self._transport.write(data)
        return self._done

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self._first = self._first or now
        self._data += data
        if not self._data.startswith(b"HTTP/1.1 200"):
            self._transport.abort()
        elif self._data.endswith(b"\r\n0\r\n\r\n") or self._data.endswith(WHOLE):
            self._done.set_result((self._first - self._began, now - self._began))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._done.done():
            self._done.set_exception(ConnectionError(f"{exc}, after {self._data[:300]!r}"))


@dataclass
class Target:
    """Where requests go, and how long they took."""

    ports: Sequence[int]
    key: bool
    idle: list[Asking] = field(default_factory=list)
    first_s: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})

    async def ask(self, number: int, prompt: str, stream: bool) -> None:
        """One request, on a connection that is open already if there is one."""
        body = json.dumps({"model": "m", "prompt": prompt, "stream": stream}).encode()
        lines = [b"POST /v1/completions HTTP/1.1", b"host: x", b"content-type: application/json"]
        if self.key:
            lines.append(b"authorization: Bearer " + KEYS[number % len(KEYS)].encode())
        head = b"\r\n".join([*lines, b"content-length: %d\r\n\r\n" % len(body)])
        if self.idle:
            connection = self.idle.pop()
        else:
            port = self.ports[number % len(self.ports)]
            _, connection = await asyncio.get_running_loop().create_connection(Asking, "127.0.0.1", port)
        first, _ = await connection.ask(head + body)
        self.first_s[stream].append(first)
        self.idle.append(connection)


async def ask_all(targets: Sequence[Target], rate: float, seconds: float, prompt_bytes: int) -> None:
    """So many requests a second for each target, in turn; every other one is a stream."""
    rng, asking = random.Random(0), set()
    prefixes = ["".join(rng.choices("abcdefgh ", k=prompt_bytes)) for _ in range(64)]
    begin = arrival = time.perf_counter()
    for number in itertools.count():
        arrival += rng.expovariate(rate * len(targets))
        if arrival - begin > seconds:
            break
        await asyncio.sleep(max(0.0, arrival - time.perf_counter()))
        target = targets[number % len(targets)]
        prompt = rng.choice(prefixes) + str(number)
        task = asyncio.create_task(target.ask(number, prompt, bool(number // len(targets) % 2)))
        asking.add(task)
        task.add_done_callback(asking.discard)
    await asyncio.wait_for(asyncio.gather(*asking), WAIT_S)


async def ask_one_by_one(targets: Sequence[Target], prompt_bytes: int) -> None:
    """Whole answers, each request after the answer of the one before."""
    for number in range(ONE_BY_ONE):
        for target in targets:
            await target.ask(number, str(number) * (prompt_bytes // len(str(number))), False)


def processor_s(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def child(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A process whose output is read."""
    command = [sys.executable, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def show_troubles(log: Iterable[str]) -> None:
    """All of a log but for what says that requests were answered."""
    for line in log:
        if " 200 request_id=" not in line and "is ready" not in line:
            print(line, end="", file=sys.stderr, flush=True)


def port_of(router: subprocess.Popen[str]) -> int:
    """Where it listens, once it says so."""
    assert router.stdout is not None
    for line in router.stdout:
        if found := re.search(r"OpenAI clients\s+http://\S+:(\d+)/", line):
            threading.Thread(target=show_troubles, args=(router.stdout,), daemon=True).start()
            return int(found[1])
    raise AssertionError("The router ended.")


async def wait_ready(port: int) -> None:
    """Until the router's servers are."""
    async with asyncio.timeout(WAIT_S):
        while True:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /ready HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            answer = await reader.read()
            writer.close()
            if answer.startswith(b"HTTP/1.1 200"):
                return
            await asyncio.sleep(0.1)


def percentile(values: Sequence[float], share: float) -> float:
    """In milliseconds."""
    return 1e3 * statistics.quantiles(values, n=1_000, method="inclusive")[round(share * 1_000) - 1]


def report(direct: Target, routed: Target, kinds: Sequence[tuple[bool, str]]) -> None:
    """A line for each kind."""
    for stream, kind in kinds:
        cells = []
        for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
            before, after = percentile(direct.first_s[stream], share), percentile(routed.first_s[stream], share)
            cells.append(f"{name} {before:6.2f} → {after:6.2f}, added {after - before:6.2f}")
        print(f"{kind:10} {len(routed.first_s[stream]):6} requests   " + "   ".join(cells), flush=True)


async def measure(options: argparse.Namespace, ports: Sequence[int], router: subprocess.Popen[str]) -> None:
    """Ask, and print."""
    port = port_of(router)
    await wait_ready(port)
    direct, routed = Target(ports, key=False), Target([port], key=True)
    await ask_all([direct, routed], options.rate, min(2.0, options.seconds), options.prompt_bytes)  # connections
    before = processor_s(router.pid)
    await asyncio.sleep(IDLE_S)
    idle = (processor_s(router.pid) - before) / IDLE_S
    for target in (direct, routed):
        target.first_s = {False: [], True: []}
    await ask_one_by_one([direct, routed], options.prompt_bytes)
    report(direct, routed, [(False, "one by one")])
    for target in (direct, routed):
        target.first_s = {False: [], True: []}
    before, began = processor_s(router.pid), time.perf_counter()
    await ask_all([direct, routed], options.rate, options.seconds, options.prompt_bytes)
    took = processor_s(router.pid) - before - idle * (time.perf_counter() - began)
    report(direct, routed, [(False, "whole"), (True, "streams")])
    count = sum(map(len, routed.first_s.values()))
    print(f"router     {1e6 * took / count:.0f} µs of processor time a request; {idle:.2%} of a core without any")


def main() -> None:
    """Start everything, and measure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rate", type=float, default=200.0, help="requests a second through the router")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--prompt-bytes", type=int, default=2_000)
    parser.add_argument("--tokens", type=int, default=32, help="events of a stream")
    parser.add_argument("--servers", type=int, default=3)
    parser.add_argument("--stubs", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--profile", help="write the router's profile (cProfile) there")
    options = parser.parse_args()
    if options.stubs:
        uvloop.run(serve_stubs(options.servers, options.tokens))
    with child(__file__, "--stubs", "--servers", str(options.servers), "--tokens", str(options.tokens)) as stubs:
        assert stubs.stdout is not None
        ports = [int(port) for port in stubs.stdout.readline().split()]
        urls = ",".join(f"http://127.0.0.1:{port}" for port in ports)
        command = ["-m", "quire", "route", "--host", "127.0.0.1", "--port", "0", "--static-backends", urls]
        if options.profile:
            command = ["-m", "cProfile", "-o", options.profile, *command]
        with child(*command, "--api-key", *KEYS) as router:
            uvloop.run(measure(options, ports, router))
            if options.profile:
                router.terminate()
                router.wait(WAIT_S)


if __name__ == "__main__":
    main()
