"""What a streamed token costs the server's processes, when the model costs nothing.

    python benchmarks/server_tokens.py [--streams 256,1000] [--tokens 100] [--step-ms 100] [--client]

A real API process serves streams over ZMQ from an engine without a model: in each step every stream gets one token,
through the engine's own outbox and encoder. The reader at the other end of the sockets is a process that only counts
events, or, with --client, the client of `quire bench serve`. Printed is processor time (user and system, all threads)
by token, from the first step to the last: `api` and `engine` (outbox, encoding and ZMQ alone), and what the reader
took, from its first connection to its end. `kernel` is the part of `api` that the system takes, nearly all of it for
the write to each socket; `request` is the API process's time for a request before its first token. `events` by token is
below 1 where tokens of a stream were sent together; `late_ms` is how long after a step was sent its last event
arrived, by the median, only with the counting reader.

Steps have to be longer than the processes need for one; otherwise tokens are coalesced and seem cheaper than they are.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import cast

import uvloop

from quire.engine.client import ZmqPort
from quire.engine.outbox import Outbox
from quire.foundation.config import Config
from quire.foundation.messages.from_engine import End, EngineId, Load, Ready
from quire.foundation.messages.to_engine import Add, ClientHeartbeat
from quire.foundation.processes.child_process import ChildProcess
from quire.foundation.processes.launch import LaunchConfig, StatusReport
from quire.text.tokenizer import load_tokenizer

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "quire" / "builtin" / "quill"
VOCAB_SIZE = 2_048
MAX_LEN = 4_096
READY = Ready("quill", MAX_LEN, VOCAB_SIZE, num_blocks=65_536, block_size=16, capacity=MAX_LEN)
WAIT_S = 60.0


class Engine:
    """Sends every stream one token a step."""

    def __init__(self, directory: Path) -> None:
        tokenizer = load_tokenizer(MODEL)
        texts = ((token, tokenizer.token_bytes(token)) for token in range(VOCAB_SIZE))
        self._vocabulary = [token for token, text in texts if text.isascii() and token not in tokenizer.special_ids]
        self._port = ZmqPort(directory, EngineId())
        self._outbox = Outbox(self._port)
        self._known: set[int] = set()
        self._streams: list[int] = []

    def wait_for_streams(self, number: int) -> None:
        """Return when that many requests have arrived."""
        deadline = time.monotonic() + WAIT_S
        while len(self._streams) < number:
            assert time.monotonic() < deadline, f"{len(self._streams)} of {number} requests came"
            self.listen()

    def listen(self) -> None:
        """Take what comes within a short time."""
        for message in self._port.drain(0.05):
            if isinstance(message, Add):
                self._streams.append(message.id)
            elif isinstance(message, ClientHeartbeat) and message.client not in self._known:
                self._known.add(message.client)
                self._port.send(message.client, READY)

    def run(self, steps: int, step_s: float) -> tuple[float, list[float]]:
        """All steps. Returns processor seconds of its own and when each step was sent, on `time.perf_counter`."""
        streams, self._streams = self._streams, []
        cpu, sent = 0.0, []
        begin = time.perf_counter()
        for step in range(steps):
            time.sleep(max(0.0, begin + step * step_s - time.perf_counter()))
            tokens = [self._vocabulary[(31 * i + 7 * step) % len(self._vocabulary)] for i in range(len(streams))]
            sent.append(time.perf_counter())
            began = time.process_time()
            self._outbox.tokens(streams, [1] * len(streams), tokens, [])
            if step + 1 == steps:
                for stream in streams:
                    self._outbox.end(End(stream, "length"))
            self._outbox.flush(Load, {})
            self._port.drain(0.0)
            cpu += time.process_time() - began
        return cpu, sent

    def close(self) -> None:
        """Close the sockets."""
        self._port.close()


class Stream(asyncio.Protocol):
    """One request whose events are counted but not parsed."""

    def __init__(self, request: bytes, arrivals: list[float]) -> None:
        self._request = request
        self._arrivals = arrivals
        self._steps = 0
        self.events = 0
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        events = data.count(b"data: ")
        if events and self._steps < len(self._arrivals):
            self._arrivals[self._steps] = time.perf_counter()
            self._steps += 1
        self.events += events
        if data.endswith(b"0\r\n\r\n") and not self.ended.done():
            self.ended.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_exception(error or ConnectionError("closed early"))


async def count_events(port: int, streams: int, tokens: int) -> None:
    """The counting reader: prints the number of text events, its processor seconds, and when the last stream had each
    of its events."""
    body = json.dumps({
        "model": "quill", "prompt": [5, 6, 7], "max_tokens": tokens, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True},
    }).encode()  # fmt: skip
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    arrivals = [0.0] * tokens
    loop = asyncio.get_running_loop()
    protocols = [
        (await loop.create_connection(lambda: Stream(request, arrivals), "127.0.0.1", port))[1] for _ in range(streams)
    ]
    cpu = time.process_time()
    await asyncio.gather(*(protocol.ended for protocol in protocols))
    extra = 3 * streams  # the closing chunk, usage, [DONE]
    events = sum(protocol.events for protocol in protocols) - extra
    print(json.dumps({"events": events, "cpu": time.process_time() - cpu, "arrivals": arrivals}))


def reader(port: int, streams: int, tokens: int, result: Path, client: bool) -> subprocess.Popen[str]:
    """The process that reads all streams."""
    if not client:
        command = [__file__, "--read-from", str(port), "--streams", str(streams), "--tokens", str(tokens)]
    else:
        command = [
            "-m", "quire.cli.main", "bench", "serve", f"--port={port}", f"--vocab-size={VOCAB_SIZE}", "--ignore-eos",
            f"--num-prompts={streams}", "--random-input-len=4", f"--random-output-len={tokens}", "--save-result",
            f"--result-filename={result}",
        ]  # fmt: skip
    return subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True, cwd=ROOT)


def processor_seconds(pid: int) -> tuple[float, float]:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    tick = os.sysconf("SC_CLK_TCK")
    return int(fields[11]) / tick, int(fields[12]) / tick


def measure(streams: int, tokens: int, step_s: float, client: bool) -> dict[str, float]:
    """Microseconds of a streamed token by process, and the rest of a row."""
    config = Config().with_values(
        model=str(MODEL), tokenizer=str(MODEL), served_model_name=("quill",), max_model_len=MAX_LEN,
        disable_log_stats=True, disable_uvicorn_access_log=True,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch, socket.create_server(("127.0.0.1", 0), backlog=2_048) as listener:
        port = listener.getsockname()[1]
        engine = Engine(Path(scratch))
        api = ChildProcess("api", "quire.serving.start", LaunchConfig(config, scratch, 0, listener.fileno()))
        deadline = time.monotonic() + WAIT_S
        while not any(isinstance(report, StatusReport) for report in api.reports()):
            assert time.monotonic() < deadline, "the API process did not start"
            engine.listen()
        result = Path(scratch) / "serve.json"
        idle = processor_seconds(api.pid)
        reading = reader(port, streams, tokens, result, client)
        engine.wait_for_streams(streams)
        before = processor_seconds(api.pid)
        engine_cpu, sent = engine.run(tokens, step_s)
        out, _ = reading.communicate(timeout=WAIT_S)
        if reading.returncode != 0:
            raise RuntimeError(f"The reader failed: {out}")
        after = processor_seconds(api.pid)
        figures = json.loads(result.read_text() if client else out)
        engine.close()
        api.close()
    total = streams * tokens
    row = {
        "streams": streams,
        "api_us": 1e6 * (sum(after) - sum(before)) / total,
        "kernel_us": 1e6 * (after[1] - before[1]) / total,
        "engine_us": 1e6 * engine_cpu / total,
        "request_us": 1e6 * (sum(before) - sum(idle)) / streams,
    }
    if client:
        row["client_us"] = 1e6 * figures["client_cpu"] * figures["duration"] / total
        row |= {name: figures[name] for name in ("median_tpot_ms", "output_throughput")}
        return row
    late = [arrived - at for arrived, at in zip(figures["arrivals"], sent, strict=True) if arrived]
    return row | {
        "reader_us": 1e6 * figures["cpu"] / total,
        "events": figures["events"] / total,
        "late_ms": 1e3 * statistics.median(late),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", default="256,1000")
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--step-ms", type=float, help="default: 0.2 ms a stream")
    parser.add_argument("--client", action="store_true")
    parser.add_argument("--read-from", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    counts = [int(count) for count in arguments.streams.split(",")]
    if arguments.read_from is not None:
        uvloop.run(count_events(arguments.read_from, counts[0], arguments.tokens))
        return
    for streams in counts:
        step_ms = arguments.step_ms if arguments.step_ms is not None else 0.2 * streams
        row = measure(streams, arguments.tokens, step_ms / 1e3, arguments.client)
        print("  ".join(f"{name} {value:.4g}" for name, value in row.items()), flush=True)


if __name__ == "__main__":
    main()
