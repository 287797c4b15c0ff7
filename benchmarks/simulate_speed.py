"""How much faster than real time `quire simulate` is.

    python benchmarks/simulate_speed.py [--streams 256] [--requests 1024] [--runs 3]

Llama-3.1-8B on one H200, from its `config.json`: requests of 512 + 128 tokens, of which --streams run at all times.
Printed are simulated seconds, seconds of this thread's processor time, and their ratio, by the best run.
"""

from __future__ import annotations

import argparse
import time

from quire.foundation.config import Config
from quire.models.spec import read_spec
from quire.planning.costmodel.cards import card
from quire.tools.simulation.deployment import deploy
from quire.tools.simulation.engine import simulate
from quire.tools.simulation.trace import Trace, TraceRequest
from quire.tools.sizing.measured_rows import DIRECTORY


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--requests", type=int, default=1_024)
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    best, steps, simulated = min(_run(arguments.streams, arguments.requests) for _ in range(arguments.runs))
    print(
        f"{arguments.streams} streams: {simulated:.2f} s simulated in {best:.2f} s, {1e3 * best / steps:.2f} ms a step"
    )
    print(f"{simulated / best:.1f} times real time")


def _run(streams: int, requests: int) -> tuple[float, int, float]:
    """Seconds of processor time, steps, and simulated seconds."""
    config = Config().with_values(max_num_seqs=streams)
    where = deploy(config, read_spec(DIRECTORY / "llama-3.1-8b"), card("h200"))
    trace = Trace(tuple(TraceRequest(0.0, 512, 128) for _ in range(requests)), streams)
    began = time.thread_time()
    found = simulate(where.config, where.spec, where.simulated(server=True), trace)
    return time.thread_time() - began, found.steps, found.seconds


if __name__ == "__main__":
    main()
