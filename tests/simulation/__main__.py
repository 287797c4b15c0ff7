"""Many seeds, one after the other: `python -m tests.simulation --seeds 1000 --steps 1000`; or one: `--seed 17`."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from tests.simulation.simulation import simulate
from tests.simulation.world import SimulationError


def main() -> int:
    """Run them; 1 if an invariant was violated."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1_000, help="how many seeds")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--steps", type=int, default=1_000, help="engine steps of each")
    parser.add_argument("--seed", type=int, help="this one alone; says everything about it")
    arguments = parser.parse_args()
    seeds = range(arguments.first, arguments.first + arguments.seeds) if arguments.seed is None else [arguments.seed]
    steps, tokens, virtual, begun = 0, 0, 0.0, time.monotonic()
    outcomes: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    for place, seed in enumerate(seeds, 1):
        try:
            summary = simulate(seed, arguments.steps)
        except SimulationError as error:
            print(error)
            return 1
        steps, tokens, virtual = steps + summary.steps, tokens + summary.tokens, virtual + summary.seconds
        outcomes.update(summary.outcomes)
        faults.update(summary.faults)
        if arguments.seed is not None:
            print(summary)
        elif place % 50 == 0 or place == len(seeds):
            took = time.monotonic() - begun
            print(f"{place} seeds, {steps:,} steps, {steps / took:,.0f} steps/s, {virtual / 3600:.1f} virtual hours")
    print(f"{sum(outcomes.values()):,} requests, {tokens:,} tokens: {dict(outcomes.most_common())}")
    print(f"{sum(faults.values()):,} faults: {dict(faults.most_common())}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
