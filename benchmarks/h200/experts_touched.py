"""How many different experts a layer needs in a decode step, with random weights; started by targets.py.

    python experts_touched.py --model DIR [--set NAME=VALUE]

The routing op is replaced by one that counts on the device, so it counts in replayed CUDA graphs as well. The counts of
a batch with one output token, and with more, differ by the decode steps. A line is a row like those of offline.py.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from pathlib import Path

import torch
from offline import Engine, emit, setting
from serving import vocabulary
from torch import Tensor
from workloads import Workloads

from quire.compute.kernels.dispatch import KERNELS, kernel

BATCHES = (1, 32, 128)
_STEPS = 32
count: Counter
"""What the table of kernels finds by its name."""


class Counter:
    """A `route` that counts; see that op."""

    def __init__(self, route: Callable[..., tuple[Tensor, Tensor]], device: str) -> None:
        self._route = route
        self._counts = torch.zeros(2, dtype=torch.int64, device=device)  # experts, calls

    def __call__(self, logits: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
        weights, numbers = self._route(logits, *rest)
        touched = torch.zeros(logits.shape[1], dtype=torch.int64, device=logits.device)
        known = numbers.flatten().long().clamp(0, logits.shape[1] - 1)  # kernels are first run before there are weights
        touched.index_fill_(0, known, 1)
        self._counts[0] += touched.sum()
        self._counts[1] += 1
        return weights, numbers

    def take(self) -> tuple[int, int]:
        """Experts and calls since the last time."""
        experts, calls = self._counts.tolist()
        self._counts.zero_()
        return experts, calls


def main() -> None:
    global count
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    count = Counter(kernel("route", device), device)
    KERNELS["route", device] = "__main__:count"
    engine = Engine(arguments.model, dict(map(setting, arguments.set)))
    workloads = Workloads(engine, vocabulary(Path(arguments.model)), random.randrange(2**32))
    for batch in BATCHES:
        totals = []
        for outputs in (1, _STEPS + 1):
            count.take()
            engine([workloads.prompt(128) for _ in range(batch)], [outputs] * batch)
            totals.append(count.take())
        (first, first_calls), (all_steps, calls) = totals
        value = (all_steps - first) / (calls - first_calls)
        emit(row=f"experts touched, b={batch}", value=value, runs=[value])


if __name__ == "__main__":
    main()
