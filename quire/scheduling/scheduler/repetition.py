"""Repetition detection: whether an output ends with several copies of a pattern."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.sampling_params import RepetitionDetectionParams

_NO_TOKEN = -1


class RepetitionDetector:
    """Watches one output, token by token. Tokens of `output` are known already and are not checked themselves.

    For each pattern size s it counts how many of the last tokens equal the token s places before them. The output ends
    with `min_count` copies of a pattern of size s when that count reaches s * (min_count - 1). So a token costs one
    comparison per size, however long the output is.
    """

    def __init__(self, params: RepetitionDetectionParams, output: Sequence[int] = ()) -> None:
        self._min_size, self._max_size = params.min_pattern_size, params.max_pattern_size
        sizes = np.arange(self._min_size, self._max_size + 1)
        self._needed = sizes * (params.min_count - 1)
        self._equal = np.zeros(len(sizes), dtype=np.int64)
        self._history = np.full(2 * self._max_size, _NO_TOKEN, dtype=np.int64)  # the last `max_size` before `_end`
        self._end = self._max_size
        window = self._max_size * params.min_count
        for token in output[max(0, len(output) - window) :]:
            self.append(token)

    def append(self, token: int) -> bool:
        """Add a token. Returns whether the output ends with the repeated pattern now."""
        history, end = self._history, self._end
        if end == len(history):
            history[: self._max_size] = history[self._max_size :]
            end = self._max_size
        before = history[end - self._max_size : end - self._min_size + 1][::-1]  # the token s places before, by size
        self._equal += 1
        self._equal *= before == token
        history[end] = token
        self._end = end + 1
        return bool((self._equal >= self._needed).any())
