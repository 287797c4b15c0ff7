"""What the server costs beside `LLM`, in one interleaved run: the same model, settings and lengths of prompts.

    python benchmarks/cpu/server_cost.py [--model DIR] [--clients 16] [--requests 64] [--input 128] [--output 128]

Two `LLM`s in this process, one with the server's own --performance-mode (balanced) and one with the default of `LLM`
(throughput), and a `quire serve` with default settings take turns, `--runs` times; who waits uses no processor. The
server is asked by `quire bench serve`. Each keeps `--clients` requests running until all are done. Printed are tokens a
second, means of the time to a request's first token and of the time between tokens (`LLM` gets all requests at once, so
its first tokens compare only with as many requests as clients; the client sees text alone, the end of an output may
have none), the server's share of either `LLM`'s tokens a second by the medians, and processor time by process.

The server's own cost is its difference to the `LLM` with equal settings: HTTP, text, messages between processes, and
the client, which runs on the same cores. What `throughput` gains beyond that is another order of work, which the server
has too under `--performance-mode throughput`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

sys.path.append(str(Path(__file__).resolve().parents[1] / "h200"))
from serving import vocabulary, with_tokenizer

from quire import LLM, SamplingParams
from quire.engine.metrics.reader import Histogram

ROOT = Path(__file__).resolve().parents[2]
BUILTIN = ROOT / "quire" / "builtin" / "quill"
START_S = 120.0
MODES = ("balanced", "throughput")
LEAST_TOKEN, END_TOKEN = 3, 200
"""Prompts are of tokens between these, behind which the built-in model says something."""
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class Workload:
    """Requests of equal lengths, with prompts that nobody has seen before."""

    def __init__(self, model: Path, arguments: argparse.Namespace) -> None:
        self.requests, self.clients = arguments.requests, arguments.clients
        self.input, self.output = arguments.input, arguments.output
        self.vocab_size = min(vocabulary(model), END_TOKEN)
        self._draw = random.Random()

    def prompts(self) -> list[dict[str, list[int]]]:
        """As `LLM` takes them."""
        ids = range(LEAST_TOKEN, self.vocab_size)
        return [{"prompt_token_ids": self._draw.choices(ids, k=self.input)} for _ in range(self.requests)]


class Figures(NamedTuple):
    """Of one run; times are means over requests."""

    tokens_per_s: float
    ttft_ms: float
    tpot_ms: float

    def shown(self) -> dict[str, float]:
        return {name: round(value, 2) for name, value in self._asdict().items()}


class Offline:
    """An `LLM` that runs as many requests at a time as there are clients, and counts as the server does."""

    def __init__(self, model: Path, mode: str, workload: Workload, max_model_len: int) -> None:
        self._workload = workload
        self._llm = LLM(
            str(model),
            disable_log_stats=False,
            max_num_seqs=workload.clients,
            performance_mode=mode,
            max_model_len=max_model_len,
            seed=0,
        )

    def run(self) -> Figures:
        """All requests once."""
        load = self._workload
        params = SamplingParams(max_tokens=load.output, ignore_eos=True, temperature=0.0)
        prompts, before = load.prompts(), self._sums()
        began = time.perf_counter()
        self._llm.generate(prompts, params, use_tqdm=False)  # type: ignore[arg-type]
        seconds = time.perf_counter() - began
        first, each = (
            1e3 * (after - sum_before) / load.requests for after, sum_before in zip(self._sums(), before, strict=True)
        )
        return Figures(load.requests * load.output / seconds, first, each)

    def _sums(self) -> list[float]:
        """Seconds of all requests so far, until the first token and between tokens."""
        found = {each.name: each.sum for each in self._llm.get_metrics() if isinstance(each, Histogram)}
        return [found["vllm:time_to_first_token_seconds"], found["vllm:request_time_per_output_token_seconds"]]

    def close(self) -> None:
        self._llm.close()


@contextmanager
def serve(model: Path, max_model_len: int, log: Path) -> Iterator[tuple[int, int]]:
    """`quire serve`: its process and port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "quire.cli.main", "serve", str(model), f"--port={port}"]
    with log.open("w") as file:
        process = subprocess.Popen(
            [*command, f"--max-model-len={max_model_len}"], stdout=file, stderr=subprocess.STDOUT, cwd=ROOT
        )
        try:
            _wait_ready(port, process, log)
            yield process.pid, port
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)


def _wait_ready(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=1):
                return
        except OSError:
            time.sleep(0.05)
    raise RuntimeError(f"The server did not start:\n{log.read_text()[-2_000:]}")


def ask(port: int, load: Workload, scratch: Path) -> Figures:
    """What `quire bench serve` says of one run.

    Raises:
        RuntimeError: Requests failed.
    """
    result = scratch / "serve.json"
    done = subprocess.run(
        [sys.executable, "-m", "quire.cli.main", "bench", "serve", f"--port={port}", "--ignore-eos",
         f"--vocab-size={load.vocab_size}", f"--num-prompts={load.requests}", f"--max-concurrency={load.clients}",
         f"--random-input-len={load.input}", f"--random-output-len={load.output}", "--save-result",
         f"--result-filename={result}"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError(f"quire bench serve failed:\n{(done.stdout + done.stderr)[-2_000:]}")
    figures = json.loads(result.read_text())
    return Figures(figures["output_throughput"], figures["mean_ttft_ms"], figures["mean_tpot_ms"])


def processor_s(parent: int) -> dict[str, float]:
    """Processor seconds of a process's children so far, by what they are: api or engine."""
    found = {}
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            name, _, rest = (directory / "stat").read_text().rpartition(") ")
            command = (directory / "cmdline").read_text()
        except OSError:
            continue
        fields = rest.split()
        if int(fields[1]) == parent:
            what = "api" if "quire.serving.api" in command else "engine" if "quire.engine" in command else name
            found[what] = found.get(what, 0.0) + (int(fields[11]) + int(fields[12])) * _TICK_S
    return found


def measure(model: Path, arguments: argparse.Namespace, scratch: Path) -> None:
    load, length = Workload(model, arguments), arguments.input + arguments.output + 16
    with serve(model, length, scratch / "server.log") as (pid, port):
        offline = {mode: Offline(model, mode, load, length) for mode in MODES}
        runs: dict[str, list[float]] = {name: [] for name in (*MODES, "server")}
        for run in range(arguments.runs + 1):  # the first warms up
            found = {mode: engine.run() for mode, engine in offline.items()}
            before = processor_s(pid)
            found["server"] = ask(port, load, scratch)
            used = {name: seconds - before.get(name, 0.0) for name, seconds in processor_s(pid).items()}
            if run:
                tokens = load.requests * load.output
                emit(run=run, **{name: figures.shown() for name, figures in found.items()},
                     us_a_token={name: round(1e6 * seconds / tokens) for name, seconds in used.items()})  # fmt: skip
                for name, figures in found.items():
                    runs[name].append(figures.tokens_per_s)
        for engine in offline.values():
            engine.close()
    server = statistics.median(runs["server"])
    emit(row=f"server, {load.clients} clients, of LLM's tokens a second",
         **{mode: round(server / statistics.median(runs[mode]), 3) for mode in MODES})  # fmt: skip


def emit(**line: object) -> None:
    print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=BUILTIN)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--input", type=int, default=128)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        scratch, model = Path(name), arguments.model
        if not (model / "tokenizer.json").exists():  # made by checkpoints.py
            model = with_tokenizer(arguments.model, scratch / arguments.model.name)
            for file in ("config.json", "model.safetensors"):  # links: packed weights are those of the checkpoint
                (model / file).unlink(missing_ok=True)
                (model / file).symlink_to((arguments.model / file).resolve())
        measure(model, arguments, scratch)


if __name__ == "__main__":
    main()
