"""Does an output go in circles? Asked at each of its tokens, for requests that want it ended then."""

from __future__ import annotations

from collections.abc import Sequence

from quire.sampling import RepetitionDetectionParams


def repeats(output: Sequence[int], asked: RepetitionDetectionParams) -> bool:
    """Whether the output ends with a pattern of a size that counts, as often as is asked for."""
    for size in range(asked.min_pattern_size, asked.max_pattern_size + 1):
        length = size * asked.min_count
        if length > len(output):
            return False
        # Every token of these but the first `size` is the one that stands a pattern before it.
        if all(output[-i] == output[-i - size] for i in range(1, length - size + 1)):
            return True
    return False
