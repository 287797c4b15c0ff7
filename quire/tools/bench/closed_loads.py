"""Loads by which an engine or a server is timed: so many requests at a time, of random lengths, one after another.

So steps have rows that decode beside parts of prompts, contexts of all lengths, and whatever comes between them, as
those of real loads do.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

REQUESTS = {1: 8, 3: 15, 8: 32, 24: 72}
"""Of a load, by how many are open at a time."""
PROMPTS, OUTPUTS = (16, 512), (8, 64)
"""Fewest and most tokens; of prompts all orders of magnitude are as frequent."""


@dataclass(frozen=True)
class ClosedLoad:
    """Requests.

    Attributes:
        open: How many at a time.
        lengths: Tokens of each prompt and output, in order.
    """

    open: int
    lengths: tuple[tuple[int, int], ...]


def closed_loads(most: int, longest: int, seed: int) -> list[ClosedLoad]:
    """Loads from few to many requests at a time.

    Args:
        most: Sequences at a time.
        longest: Tokens of a sequence.
    """
    draw = random.Random(seed)
    outputs = tuple(max(1, min(bound, longest // 4)) for bound in OUTPUTS)
    prompts = tuple(max(1, min(bound, longest - outputs[1] - 1)) for bound in PROMPTS)

    def lengths() -> tuple[int, int]:
        share = draw.random()
        return round(prompts[0] ** (1 - share) * prompts[1] ** share), draw.randint(*outputs)

    return [ClosedLoad(n, tuple(lengths() for _ in range(count))) for n, count in REQUESTS.items() if n <= most]
