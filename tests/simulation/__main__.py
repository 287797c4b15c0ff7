"""Many seeds: `python -m tests.simulation --seeds 1000 --steps 1000 --jobs 4`; or one: `--seed 17`."""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.queues import SimpleQueue

from tests.simulation.simulation import Summary, simulate
from tests.simulation.world import SimulationError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run them; 1 if an invariant was violated."""
    options = _parser().parse_args(arguments)
    try:
        if options.seed is not None:
            print(simulate(options.seed, options.steps, engines=options.engines))
        else:
            seeds = range(options.first, options.first + options.seeds)
            _tell(summaries(seeds, options.steps, options.jobs, options.engines), len(seeds))
    except SimulationError as error:
        print(error)
        return 1
    return 0


def summaries(seeds: Iterable[int], steps: int, jobs: int, engines: int = 1) -> Iterator[Summary]:
    """In the order of seeds; the first violation is raised."""
    if jobs == 1:
        yield from (simulate(seed, steps, engines=engines) for seed in seeds)
        return
    cores: SimpleQueue[int] = multiprocessing.SimpleQueue()
    for core in itertools.islice(itertools.cycle(sorted(os.sched_getaffinity(0))), jobs):
        cores.put(core)
    with ProcessPoolExecutor(jobs, initializer=_stay_on_one_core, initargs=(cores,)) as pool:
        yield from pool.map(simulate, seeds, *map(itertools.repeat, (steps, None, engines)))


def _stay_on_one_core(cores: SimpleQueue[int]) -> None:
    """Threads of a simulation run one at a time, and wake each other sooner on one core."""
    os.sched_setaffinity(0, {cores.get()})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1_000, help="how many seeds")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--steps", type=int, default=1_000, help="engine steps of each")
    parser.add_argument("--engines", type=int, default=1, help="of each server")
    parser.add_argument("--jobs", type=int, default=1, help="how many run at once, each in a process")
    parser.add_argument("--seed", type=int, help="this one alone; says everything about it")
    return parser


def _tell(summaries: Iterator[Summary], count: int) -> None:
    """Say how far it is, and in the end what there was."""
    steps, tokens, virtual, begun = 0, 0, 0.0, time.monotonic()
    outcomes: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    for place, summary in enumerate(summaries, 1):
        steps, tokens, virtual = steps + summary.steps, tokens + summary.tokens, virtual + summary.seconds
        outcomes.update(summary.outcomes)
        faults.update(summary.faults)
        if place % 50 == 0 or place == count:
            took = time.monotonic() - begun
            print(f"{place} seeds, {steps:,} steps, {steps / took:,.0f} steps/s, {virtual / 3600:.1f} virtual hours")
    print(f"{outcomes.total():,} requests, {tokens:,} tokens: {dict(outcomes.most_common())}")
    print(f"{faults.total():,} faults: {dict(faults.most_common())}")


if __name__ == "__main__":
    sys.exit(main())
