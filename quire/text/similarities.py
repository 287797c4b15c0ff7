"""How alike two embeddings are, by the functions that sentence-transformers names."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Vector = NDArray[np.float64]
    """[dim], or [tokens, dim]."""

_PRODUCTS = 2**20
"""Products of tokens that are held at a time."""


def cosine(a: Vector, b: Vector) -> float:
    """The cosine of two vectors; 0 if one of them is zero."""
    lengths = math.sqrt(float(a @ a) * float(b @ b))
    return float(a @ b) / lengths if lengths else 0.0


SIMILARITIES: dict[str, Callable[[Vector, Vector], float]] = {
    "cosine": cosine,
    "dot": lambda a, b: float(a @ b),
    "euclidean": lambda a, b: -math.sqrt(float(((a - b) ** 2).sum())),
    "manhattan": lambda a, b: -float(abs(a - b).sum()),
}
"""By name. Distances are negated, so that more is always more alike."""


def max_sim(query: Vector, document: Vector) -> float:
    """For each row of the query, [tokens, dim], the largest product with a row of the document, added up (Khattab &
    Zaharia 2020, ColBERT).
    """
    rows = max(1, _PRODUCTS // len(document))
    parts = (query[first : first + rows] for first in range(0, len(query), rows))
    return float(sum((part @ document.T).max(axis=1).sum() for part in parts))
