"""What is asked of an engine in one process: the workloads behind the offline rows, and how a row's figure comes from
their runs.

Prompts are random token ids, all different; greedy unless said; every output has exactly its length. Knows nothing
about the engine: it is given a function that generates and says how long that took.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Prompt = list[int]
Figures = dict[str, float]

SAMPLED = {"temperature": 0.8, "top_p": 0.95, "top_k": 50}


class Generate(Protocol):
    """Runs prompts to exactly these output lengths."""

    def __call__(self, prompts: Sequence[Prompt], outputs: Sequence[int], **sampling: Any) -> float:
        """Seconds from asking to the last token; greedy unless sampling parameters are given."""
        ...


@dataclass(frozen=True)
class Workload:
    """One measurement, which fills one row or several.

    Attributes:
        rows: Names of the figures it gives.
        measure: Runs it once.
        repeats: How often, for one run of the benchmark.
        cost_s: About how long all of them take, for a model of 8B.
        best: A run's figure is the best of its repeats. The row's is the median in any case, of the runs' or of all
            repeats: a best of many would be the one whose error helped most.
    """

    rows: tuple[str, ...]
    measure: Callable[[], Figures]
    repeats: int
    cost_s: float
    best: bool = False

    def figure(self, values: Sequence[float]) -> float:
        """The figure of a row from the repeats of all runs, one run's behind another's."""
        if self.best:
            values = [min(values[first : first + self.repeats]) for first in range(0, len(values), self.repeats)]
        return statistics.median(values)


class Workloads:
    """All of them, over one engine.

    Args:
        generate: The engine.
        ids: Token ids are below this.
        seed: Of the prompts.
    """

    def __init__(self, generate: Generate, ids: int, seed: int) -> None:
        self._generate = generate
        self._ids = ids
        self._draw = random.Random(seed)

    def warm_up(self) -> None:
        """A few short requests."""
        self._generate([self.prompt(64) for _ in range(4)], [8] * 4)

    def all(self) -> Iterator[Workload]:
        """In the order in which they are run."""
        for batch in (1, 8, 32, 64, 128, 256):
            yield Workload((f"decode b={batch}",), self._of(self.decode, batch), repeats=2, cost_s=6, best=True)
        for length in (512, 2_048, 8_192, 32_000):
            row, repeats = f"first token, {length:,} in", 3 if length > 8_192 else 5
            yield Workload((row,), self._of(self.first_token, length), repeats=repeats, cost_s=4)
        names = ("decode b=256, sampled", "decode b=256, sampled / greedy")
        yield Workload(names, self.sampled, repeats=3, cost_s=30)
        yield Workload(("decode b=1, 130k context",), self.long_context, repeats=1, cost_s=30)
        names = ("first token, 40 lengths, p95 / median", "first token, 40 lengths, worst / median")
        yield Workload(names, self.lengths, repeats=1, cost_s=6)
        yield Workload(("prefix 2,000 + 50, cold", "prefix 2,000 + 50, hit"), self.prefix, repeats=3, cost_s=2)
        yield Workload(("1,000 × (512 + 128)",), self.throughput, repeats=1, cost_s=20)
        yield Workload(("256 × (100–1,024 + 100–1,024)",), self.mixed, repeats=1, cost_s=16)

    def prompt(self, length: int) -> Prompt:
        """A new random prompt."""
        return self._draw.choices(range(self._ids), k=length)

    def decode(self, batch: int, **sampling: Any) -> Figures:
        """Milliseconds of a step after prompts of 128 tokens: many steps, less what the prompts took."""
        steps = 128 if batch > 64 else 256
        first, last = (
            self._generate([self.prompt(128) for _ in range(batch)], [n] * batch, **sampling) for n in (1, steps + 1)
        )
        return {f"decode b={batch}": (last - first) / steps * 1e3}

    def sampled(self) -> Figures:
        """The same batch greedy and sampled."""
        row, milliseconds = "decode b=256", []
        for how in ({}, SAMPLED):
            self._generate([self.prompt(128) for _ in range(256)], [9] * 256, **how)
            milliseconds.append(self.decode(256, **how)[row])
        greedy, sampled = milliseconds
        return {f"{row}, sampled": sampled, f"{row}, sampled / greedy": sampled / greedy}

    def long_context(self) -> Figures:
        """Milliseconds of a step after 130,000 tokens, which are cached when the steps are timed."""
        prompt, steps = [self.prompt(130_000)], 128
        self._generate(prompt, [1])
        first = self._generate(prompt, [1])
        return {"decode b=1, 130k context": (self._generate(prompt, [steps + 1]) - first) / steps * 1e3}

    def first_token(self, length: int) -> Figures:
        """Milliseconds of one prompt and one token."""
        return {f"first token, {length:,} in": self._generate([self.prompt(length)], [1]) * 1e3}

    def lengths(self) -> Figures:
        """First tokens over 40 lengths in no order, each against the nine around it by milliseconds a token."""
        lengths = random.Random(5).sample(range(300, 9_000), 40)
        seconds = {length: self._generate([self.prompt(length)], [1]) for length in lengths}
        ordered = sorted(seconds)
        rates = [seconds[length] / length for length in ordered]
        ratios = sorted(rate / statistics.median_high(rates[max(0, i - 4) : i + 5]) for i, rate in enumerate(rates))
        name = "first token, 40 lengths"
        return {f"{name}, p95 / median": ratios[37], f"{name}, worst / median": ratios[-1]}

    def prefix(self) -> Figures:
        """Milliseconds to the first token of 50 tokens behind 2,000 that are new (cold) or cached (hit)."""
        shared = self.prompt(2_000)
        cold, *hits = (self._generate([shared + self.prompt(50)], [1]) * 1e3 for _ in range(6))
        return {"prefix 2,000 + 50, cold": cold, "prefix 2,000 + 50, hit": statistics.median(hits)}

    def throughput(self) -> Figures:
        """Seconds for all, sent at once."""
        return {"1,000 × (512 + 128)": self._generate([self.prompt(512) for _ in range(1_000)], [128] * 1_000)}

    def mixed(self) -> Figures:
        """Seconds for prompts and outputs of mixed lengths, sent at once; the lengths are always the same."""
        draw = random.Random(0)
        inputs, outputs = ([draw.randint(100, 1_024) for _ in range(256)] for _ in range(2))
        return {"256 × (100–1,024 + 100–1,024)": self._generate([self.prompt(n) for n in inputs], outputs)}

    @staticmethod
    def _of(measure: Callable[[int], Figures], size: int) -> Callable[[], Figures]:
        return lambda: measure(size)
