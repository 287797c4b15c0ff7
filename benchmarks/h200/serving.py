"""The rows that need a server: `quire serve` with random weights and a made-up tokenizer, under `quire bench serve`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

ROOT = Path(__file__).resolve().parents[2]
START_S = 300.0
_POLL_S = 0.02
_END_S = 30.0


@dataclass(frozen=True)
class Clients:
    """A load of prompts of 512 tokens with outputs of 128.

    Attributes:
        name: In the rows.
        requests: In all.
        concurrency: At a time; None: all at once.
        cost_s: About how long it takes, for a model of 8B.
    """

    name: str
    requests: int
    concurrency: int | None
    cost_s: float

    @property
    def rows(self) -> dict[str, str]:
        """Row by the name of its figure in the result of `quire bench serve`."""
        return {
            "output_throughput": f"server, {self.name}, output",
            "median_ttft_ms": f"server, {self.name}, TTFT p50",
            "median_tpot_ms": f"server, {self.name}, TPOT p50",
        }


LOADS = (
    Clients("1 client", 20, 1, cost_s=15),
    Clients("32 clients", 320, 32, cost_s=13),
    Clients("64 clients", 640, 64, cost_s=18),
    Clients("1,000 at once", 1_000, None, cost_s=24),
)


def with_tokenizer(model: Path, directory: Path) -> Path:
    """A copy of the model's config beside a tokenizer that has a word for every id of its vocabulary."""
    directory.mkdir(parents=True, exist_ok=True)
    shutil.copy(model / "config.json", directory)
    size = vocabulary(model)
    words = {f"Ġ{number:x}": number for number in range(size)}  # Ġ: a space, in byte-level vocabularies
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="Ġ0"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def vocabulary(model: Path) -> int:
    """Token ids of a model."""
    size: int = json.loads((model / "config.json").read_text())["vocab_size"]
    return size


@dataclass(frozen=True)
class Server:
    """A running server.

    Attributes:
        start_s: From its process's start until it was ready.
    """

    port: int
    start_s: float


@contextmanager
def serve(model: Path, settings: Sequence[str], environment: dict[str, str], log: Path) -> Iterator[Server]:
    """`quire serve`, ended on leaving.

    Raises:
        RuntimeError: It did not start; the message has the end of its log.
    """
    port = _free_port()
    flags = [f"--{name.replace('_', '-')}={value}" for name, _, value in (pair.partition("=") for pair in settings)]
    command = [sys.executable, "-m", "quire.cli.main", "serve", str(model), f"--port={port}", "--load-format=dummy"]
    with log.open("w") as file:
        began = time.perf_counter()
        process = subprocess.Popen(
            [*command, *flags], stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, env=os.environ | environment
        )
        try:
            _wait_ready(process, port, log)
            yield Server(port, time.perf_counter() - began)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def load(server: Server, clients: Clients, vocab_size: int, scratch: Path) -> dict[str, float]:
    """Figures of one run with prompts nobody has seen, by row.

    Raises:
        RuntimeError: Requests failed.
    """
    result = scratch / "serve.json"
    command = [
        sys.executable, "-m", "quire.cli.main", "bench", "serve", f"--port={server.port}",
        f"--vocab-size={vocab_size}", "--ignore-eos", f"--num-prompts={clients.requests}", "--num-warmups=2",
        "--random-input-len=512", "--random-output-len=128", "--save-result", f"--result-filename={result}",
    ]  # fmt: skip
    if clients.concurrency is not None:
        command.append(f"--max-concurrency={clients.concurrency}")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"quire bench serve failed:\n{(done.stdout + done.stderr)[-2_000:]}")
    figures = json.loads(result.read_text())
    return {row: figures[name] for name, row in clients.rows.items()}


def _wait_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.perf_counter() + START_S
    with httpx.Client(trust_env=False) as http:
        while time.perf_counter() < deadline and process.poll() is None:
            try:
                if http.get(f"http://127.0.0.1:{port}/health").status_code == httpx.codes.OK:
                    return
            except httpx.TransportError:
                pass
            time.sleep(_POLL_S)
    raise RuntimeError(f"The server did not start:\n{log.read_text()[-2_000:]}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
