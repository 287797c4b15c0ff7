"""Configs that were measured for one shape of weight serve its neighbours."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeVar

C = TypeVar("C")


def nearest(table: Mapping[tuple[int, int], C], outputs: int, columns: int) -> C:
    """The entry of the nearest (outputs, columns), by the ratios of the sides."""

    def distance(shape: tuple[int, int]) -> float:
        return abs(math.log(shape[0] / outputs)) + abs(math.log(shape[1] / columns))

    return table[min(table, key=distance)]
