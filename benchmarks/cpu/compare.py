"""Quire beside other engines on this machine's processor, in one interleaved run.

    python benchmarks/cpu/compare.py --install [--engines quire,llama_cpp …] [--shape 0.5b|tiny] [--workloads W1,W2 …]
        [--gguf Q8_0|Q4_K_M … | --int8] [--runs N] [--environments DIR] [--checkpoints DIR] [--json FILE]
        [--picture FILE.svg] [--lock FILE …]

Every engine is loaded once, in a process and an environment of its own. Then each run measures each workload with one
engine after the other, beginning with another one each time, so that what happens to the machine happens to all of
them. Printed are medians, their ratio to the others', and what other processes took meanwhile.

--gguf compares those that read GGUF files, on one that llama.cpp's quantizer has made. --int8 compares integers of 8
bits, of each engine its own: W8A8 of compressed-tensors (Quire, with a KV cache of int8), Q8_0 (llama.cpp), what
optimum-intel makes (OpenVINO, with a KV cache of 8 bits).

--lock takes this file's lock while an engine is measured by a workload, but not while engines start, for machines whose
other jobs take it as well.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import signal
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from checkpoints import config_of, make_checkpoint
from engine_client import EngineClient, EngineFailed, machine_busy_seconds, stolen_seconds
from environments import gguf_file, interpreter
from int8_checkpoint import make_int8_checkpoint
from report import picture, tables
from workloads import MAX_RUNNING, Workload, workloads

ENGINES = ("quire", "llama_cpp", "vllm", "openvino", "transformers")
_READ_GGUF = ("quire", "llama_cpp")
_HAVE_INT8 = ("quire", "llama_cpp", "openvino")
_WARM_UP = Workload("warm-up", (128,) * MAX_RUNNING, (4,) * MAX_RUNNING)


@dataclass(frozen=True)
class Row:
    """A figure of one run.

    Attributes:
        engine: Its name.
        figure: What was measured, see Workload.measure.
        value: Tokens a second.
        others: Cores that other processes kept busy meanwhile, on average.
        stolen: Cores that a hypervisor took.
    """

    engine: str
    figure: str
    value: float
    others: float
    stolen: float


def main() -> None:
    arguments = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # and no engine stays behind
    checkpoint = make_checkpoint(arguments.shape, arguments.checkpoints)
    with ExitStack() as stack:
        clients = list(_start(arguments, checkpoint, stack))
        if not clients:
            sys.exit("No engine can be measured.")
        chosen = [workloads()[name] for name in arguments.workloads.split(",")]
        rows = list(_measure(clients, chosen, arguments.runs, arguments.lock))
        starts = {
            client.name: {
                "version": client.version,
                "first_token_s": round(client.first_token_s, 2),
                "peak_rss_gb": round(client.peak_rss_gb(), 2),
            }
            for client in clients
        }
    values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        values[row.figure][row.engine].append(row.value)
    medians = {figure: {e: statistics.median(v) for e, v in found.items()} for figure, found in values.items()}
    print(tables(starts, medians))
    if arguments.json:
        found = {
            "shape": arguments.shape,
            "gguf": arguments.gguf,
            "int8": arguments.int8,
            "starts": starts,
            "medians": medians,
            "rows": [asdict(row) for row in rows],
        }
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    if arguments.picture:
        arguments.picture.write_text(picture(arguments.shape, medians))


def _start(arguments: argparse.Namespace, checkpoint: Path, stack: ExitStack) -> Iterator[EngineClient]:
    """Those engines that can be had; why not, of the others."""
    arguments.environments.mkdir(parents=True, exist_ok=True)
    vocab_size = config_of(checkpoint)["vocab_size"]
    names = arguments.engines.split(",")
    if arguments.gguf or arguments.int8:
        names = [name for name in names if name in (_HAVE_INT8 if arguments.int8 else _READ_GGUF)]
    int8 = make_int8_checkpoint(checkpoint) if arguments.int8 else None
    gguf = _gguf(arguments, checkpoint) if arguments.gguf or ("llama_cpp" in names and int8) else None
    for name in names:
        own = int8 if int8 and name != "llama_cpp" else gguf or checkpoint
        log = arguments.environments / f"{name}.log"
        try:
            python = interpreter(name, arguments.environments, arguments.install)
            client = EngineClient(name, python, own, MAX_RUNNING, vocab_size, log)
            stack.callback(client.close)
            client.seconds(_WARM_UP.inputs, _WARM_UP.outputs)
            client.stop()
        except EngineFailed as error:
            print(f"{name} is skipped: {error}", file=sys.stderr, flush=True)
            continue
        yield client


def _gguf(arguments: argparse.Namespace, checkpoint: Path) -> Path:
    """The checkpoint as llama.cpp's quantizer makes it."""
    try:
        return gguf_file(checkpoint, arguments.gguf or "Q8_0", arguments.environments, arguments.install)
    except EngineFailed as error:
        sys.exit(f"No GGUF file can be made: {error}")


def _measure(
    clients: Sequence[EngineClient], chosen: Sequence[Workload], runs: int, locks: Sequence[Path]
) -> Iterator[Row]:
    for run in range(runs):
        for number, workload in enumerate(chosen):
            first = (run + number) % len(clients)
            for client in [*clients[first:], *clients[:first]]:
                with _locked(locks), client.awake():
                    yield from _measure_one(client, workload)


def _measure_one(client: EngineClient, workload: Workload) -> Iterator[Row]:
    began, machine, own, stolen = time.perf_counter(), machine_busy_seconds(), client.busy_seconds(), stolen_seconds()
    figures = workload.measure(client.seconds)
    took = time.perf_counter() - began
    others = max(0.0, machine_busy_seconds() - machine - (client.busy_seconds() - own)) / took
    stolen = (stolen_seconds() - stolen) / took
    for figure, value in figures.items():
        print(
            f"{figure:16} {client.name:14} {value:9.1f} tok/s   other processes {others:.2f} cores, stolen {stolen:.2f}"
        )
        sys.stdout.flush()
        yield Row(client.name, figure, value, round(others, 2), round(stolen, 2))


@contextmanager
def _locked(paths: Sequence[Path]) -> Iterator[None]:
    with ExitStack() as stack:
        for path in paths:
            fcntl.flock(stack.enter_context(path.open("w")), fcntl.LOCK_EX)
        yield


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cache = Path("~/.cache/quire/benchmarks").expanduser()
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--shape", default="0.5b", choices=("0.5b", "tiny"))
    parser.add_argument("--gguf", metavar="TYPES", help="Q8_0, Q4_K_M, or another of llama.cpp's names")
    parser.add_argument("--int8", action="store_true", help="integers of 8 bits, of each engine its own")
    parser.add_argument("--workloads", default=",".join(name for name in workloads() if name != "W3/2"))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--install", action="store_true", help="make the environments that are missing")
    parser.add_argument("--environments", type=Path, default=cache / "environments", help="DIR/ENGINE/bin/python")
    parser.add_argument("--checkpoints", type=Path, default=cache / "checkpoints")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--lock", type=Path, action="append", default=[])
    return parser.parse_args()


if __name__ == "__main__":
    main()
