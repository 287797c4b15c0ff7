"""Least squares whose terms are times, which are not negative."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


def non_negative(features: FloatArray, wanted: FloatArray) -> FloatArray:
    """Terms of the least squares; those that would be negative are left out, one after another, and are 0.

    Args:
        features: What each term is multiplied with, [equations, terms].
        wanted: [equations]
    """
    scale = np.maximum(1e-12, np.abs(features).max(axis=0))
    terms, used = np.zeros(len(scale)), list(range(len(scale)))
    while used:
        found = np.linalg.lstsq(features[:, used] / scale[used], wanted, rcond=None)[0]
        worst = int(np.argmin(found))
        if found[worst] >= 0:
            terms[used] = found
            break
        del used[worst]
    return np.asarray(terms / scale)
