"""What a request costs the event loop of an API process, with sockets and the engine left out.

    python benchmarks/host_arrivals.py [--requests 200] [--runs 9] [--profile KIND]

The server's own HTTP protocol, application and session, in its own kind of event loop; bytes go straight to the
protocol, and an engine without a model answers when it is told to. Prints medians of processor time in microseconds:

- refused: a request that meets a full queue, to its 429;
- arrival: from a request's bytes until the engine has its Add;
- token: one token of a stream, in steps of 16 streams;
- end: the last message, to the last byte and until the response's tasks are gone.

Refusals and arrivals each of /v1/completions (128 token ids) and of /v1/chat/completions (a short message), streams.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import itertools
import json
import pstats
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import monotonic, thread_time
from typing import Any

from uvicorn.server import ServerState

from quire.engine.client import EngineClient, Lost
from quire.foundation.clock import Clock
from quire.foundation.config import Config
from quire.foundation.messages.from_engine import Deltas, End, EngineId, FromEngine, Load, Ready
from quire.foundation.messages.to_engine import Add, ToEngine
from quire.serving.api.event_loop import MeasuredLoop
from quire.serving.api.http_server import BoundedHttpProtocol
from quire.serving.api.session.session import EngineSession
from quire.serving.api_server import uvicorn_config
from quire.serving.app import create_app
from quire.text.model_text import load_model_text

MODEL = Path(__file__).resolve().parents[1] / "quire" / "builtin" / "quill"
MAX_LEN, SLOTS, STREAMS = 4_096, 64, 16
READY = Ready("quill", MAX_LEN, 8_192, num_blocks=65_536, block_size=16, capacity=MAX_LEN)
CONTENT = "Say in one sentence what a paged KV cache is good for."
FULL = Load(running=SLOTS, waiting=500, queued_tokens=100_000, tokens_per_s=1_000.0)
EMPTY = Load(tokens_per_s=1_000.0, free_blocks=65_536, num_blocks=65_536, block_size=16)
KEY = "secret"
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {"prompt": [5 + i % 90 for i in range(128)]}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": CONTENT}]}),
}


class Engine:
    """EngineClient and receiver in one: says what it is told to, in the event loop."""

    number = 1
    engine = EngineId()
    heard_at: float | None = None

    def __init__(self) -> None:
        self.adds: list[Add] = []
        self.say: Callable[[FromEngine | Lost], None] = lambda message: None

    def receiver(self, client: EngineClient, clock: Clock, on_message: Callable[[FromEngine | Lost], None]) -> Engine:
        """As the session makes one."""
        self.say = on_message
        return self

    def start(self) -> None:
        pass

    def send(self, message: ToEngine) -> None:
        if isinstance(message, Add):
            self.adds.append(message)

    def connect(self, engine: EngineId) -> None:
        pass

    def receive(self, timeout: float | None) -> None:
        return None

    def close(self) -> Any:
        return asyncio.sleep(0)


class Transport(asyncio.Transport):
    """A client that reads everything at once."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 50_000), "sockname": ("127.0.0.1", 8_000)})
        self.written: list[bytes] = []

    def write(self, data: Any) -> None:
        self.written.append(data)

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


class Connection:
    """A connection that is kept alive."""

    def __init__(self, config: Any, state: ServerState) -> None:
        self.transport = Transport()
        self.protocol = BoundedHttpProtocol(config, state, {})
        self.protocol.connection_made(self.transport)

    def ask(self, request: bytes) -> None:
        self.transport.written.clear()
        self.protocol.data_received(request)


class Bench:
    """An API process without sockets."""

    def __init__(self, scratch: str) -> None:
        config = Config().with_values(
            model=str(MODEL), tokenizer=str(MODEL), served_model_name=("quill",), max_model_len=MAX_LEN,
            max_num_seqs=SLOTS, api_key=(KEY,), disable_log_stats=True, disable_uvicorn_access_log=True,
            max_queue_time=2.0, responses_store_path=f"{scratch}/store.sqlite",
        )  # fmt: skip
        text, self.engine = load_model_text(config), Engine()
        self.session = EngineSession(
            [self.engine],  # type: ignore[list-item]
            config,
            text.eos_ids,
            special_tokens=text.special_tokens,
            make_receiver=self.engine.receiver,  # type: ignore[arg-type]
        )
        self.http = uvicorn_config(create_app(config, self.session, text), config.server)
        self.http.load()
        self.state = ServerState()

    async def turn_until(self, done: Callable[[], bool]) -> None:
        """Turns of the loop."""
        deadline = monotonic() + 10
        while not done():
            assert monotonic() < deadline, [each.transport.written for each in self.connections]
            await asyncio.sleep(0)

    async def start(self) -> None:
        """Take work."""
        self.session.start()
        self.engine.say(READY)
        self.connections = [Connection(self.http, self.state) for _ in range(STREAMS)]

    def load(self, load: Load) -> None:
        """What the engine has to do."""
        last = self.engine.adds[-1].id if self.engine.adds else 0
        self.engine.say(Deltas([], [], [], load=load, last_add=last))

    async def refused(self, request: bytes, number: int) -> float:
        """Seconds a request."""
        self.load(FULL)
        connection, began = self.connections[0], thread_time()
        for _ in range(number):
            connection.ask(request)
            await self.turn_until(lambda: connection.protocol.cycle.response_complete)
        took = thread_time() - began
        assert connection.transport.written[0].startswith(b"HTTP/1.1 429"), connection.transport.written
        self.load(EMPTY)
        return took / number

    def _is_read(self, sequence: int) -> bool:
        """Whether somebody reads the deltas of a sequence."""
        found = self.session.requests.get(sequence)
        return found is not None and found.collector._on_delta is not None

    async def streams(self, request: bytes, tokens: int) -> tuple[float, float, float]:
        """Seconds of an arrival, a token and an end."""
        self.engine.adds.clear()
        began = thread_time()
        for number, connection in enumerate(self.connections, 1):
            connection.ask(request)
            await self.turn_until(lambda: len(self.engine.adds) == number)  # noqa: B023
        arrival = thread_time() - began
        await asyncio.sleep(0)
        ids, ones = [add.id for add in self.engine.adds], [1] * STREAMS
        await self.turn_until(lambda: all(self._is_read(id) for id in ids))
        texts = itertools.cycle(range(300, 600))
        began = thread_time()
        for _ in range(tokens):
            self.engine.say(Deltas(ids, ones, [next(texts) for _ in ids], load=EMPTY, last_add=ids[-1]))
        token = thread_time() - began
        began = thread_time()
        self.engine.say(Deltas(ids, ones, ones, ends=[End(i, "length") for i in ids], load=EMPTY, last_add=ids[-1]))
        await self.turn_until(lambda: all(c.protocol.cycle.response_complete for c in self.connections))
        await self.turn_until(lambda: not self.state.tasks)
        end = thread_time() - began
        assert self.connections[0].transport.written[0].startswith(b"HTTP/1.1 200"), self.connections[0].transport
        return arrival / STREAMS, token / STREAMS / tokens, end / STREAMS


def request_bytes(path: str, body: dict[str, Any]) -> bytes:
    """As OpenAI's client sends it."""
    content = json.dumps(
        {"model": "quill", **body, "max_tokens": 128, "stream": True, "temperature": 0, "ignore_eos": True}
    ).encode()
    headers = (
        f"POST {path} HTTP/1.1\r\nHost: localhost:8000\r\nAccept-Encoding: identity\r\nAccept: application/json\r\n"
        f"User-Agent: benchmark\r\nAuthorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    return headers.encode() + content


async def measure(bench: Bench, requests: int, runs: int, profiled: str) -> None:
    await bench.start()
    rows: dict[str, list[float]] = {}
    profile = cProfile.Profile()
    for run in range(runs + 1):  # the first warms up
        for name, (path, body) in BODIES.items():
            request = request_bytes(path, body)
            if profiled == f"refused {name}" and run:
                profile.enable()
            found = {f"refused {name}": await bench.refused(request, requests)}
            profile.disable()
            if profiled == f"stream {name}" and run:
                profile.enable()
            each = [await bench.streams(request, 32) for _ in range(max(1, requests // STREAMS))]
            profile.disable()
            parts = (statistics.mean(part) for part in zip(*each, strict=True))
            found |= dict(zip((f"arrival {name}", f"token {name}", f"end {name}"), parts, strict=True))
            if run:
                for row, seconds in found.items():
                    rows.setdefault(row, []).append(seconds)
    if profiled:
        pstats.Stats(profile, stream=sys.stdout).sort_stats("tottime").print_stats(60)
    for row, seconds_of in rows.items():
        print(f"{row:22} {1e6 * statistics.median(seconds_of):7.1f} us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--profile", default="", help="'refused chat', 'stream completions', …")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(scratch)
        loop = MeasuredLoop(bench.session.stats.callbacks)
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(measure(bench, arguments.requests, arguments.runs, arguments.profile))


if __name__ == "__main__":
    main()
