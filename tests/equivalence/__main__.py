"""Runs random schedules of requests on tiny engines, and prints a line for each: its seed, its engine, a digest of all
tokens, and the sum of its log probabilities.

    python -m tests.equivalence --seeds 0:1000 > new.txt
    python -m tests.equivalence --seeds 0:1000 --tree ../before > old.txt
    python -m tests.equivalence --compare old.txt new.txt

tells whether the code of another checkout brings the same tokens; `--alone` compares each request with itself, run
alone where nothing is preempted or drafted.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run or compare them; 1 if any differ."""
    options = _parser().parse_args(arguments)
    _use(options.tree.resolve())
    if options.compare:
        return _compare(*options.compare)
    began, different = time.monotonic(), 0
    with tempfile.TemporaryDirectory() as temporary:
        different, happened = _run(options.models or Path(temporary), range(*options.seeds), options.alone)
    from tests.equivalence.schedules import MUST_HAPPEN

    print(f"{len(range(*options.seeds))} schedules in {time.monotonic() - began:.0f} s", file=sys.stderr)
    for name in sorted({*happened, *MUST_HAPPEN}):
        print(f"{happened[name]:10,} {name}", file=sys.stderr)
    return 1 if different else 0


def _use(tree: Path) -> None:
    """Import quire from this checkout, in this process and those that it starts."""
    sys.path.insert(0, str(tree))
    os.environ |= {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    import quire

    if Path(quire.__file__).parents[1] != tree:
        raise SystemExit(f"quire is imported from {quire.__file__}, not from {tree}.")


def _run(models: Path, seeds: range, alone: bool) -> tuple[int, Counter[str]]:
    """How many schedules bring something else when their requests run alone, and what happened."""
    import torch

    from tests.equivalence.engines import make_models
    from tests.equivalence.schedules import Schedules

    torch.set_num_threads(1)
    make_models(models)
    different = 0
    with Schedules(models) as schedules:
        for seed in seeds:
            outcome = schedules.run(seed)
            print(outcome, flush=seed % 100 == 0)
            if alone and not outcome.equals(expected := schedules.run_alone(seed)):
                different += 1
                print(f"{expected} alone")
        return different, schedules.happened


def _compare(old: Path, new: Path) -> int:
    """Print what differs between two outputs."""
    from tests.equivalence.schedules import Outcome

    before, after = ([Outcome.parse(line) for line in file.read_text().splitlines()] for file in (old, new))
    both = list(zip(before, after, strict=False))
    different = [(one, other) for one, other in both if not one.equals(other)]
    for one, other in different:
        print(f"- {one}\n+ {other}")
    print(f"{len(different)} of {len(both)} schedules differ", file=sys.stderr)
    return 1 if different else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.equivalence", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=_range, default=(0, 100), help="FIRST:END, 0:100 by default")
    parser.add_argument("--tree", type=Path, default=ROOT, help="whose quire runs; by default that of this checkout")
    parser.add_argument("--models", type=Path, help="where the checkpoints are; they are made if they are missing")
    parser.add_argument("--alone", action="store_true", help="compare with each request run alone")
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("OLD", "NEW"), help="compare two outputs")
    return parser


def _range(text: str) -> tuple[int, int]:
    first, _, end = text.partition(":")
    return int(first), int(end)


if __name__ == "__main__":
    sys.exit(main())
