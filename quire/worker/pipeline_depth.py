"""How many steps may be in flight. Imports no torch: executors ask before it is there."""

MAX_STEPS_IN_FLIGHT = 2
"""Steps that may be launched before the oldest one's result is taken: one runs, the next one waits behind it. Whatever
steps use in turn is not used again before that.
"""


def most_in_flight(stages: int) -> int:
    """Of an engine whose model is divided into stages: a step in each of them, and one that waits."""
    return MAX_STEPS_IN_FLIGHT + stages - 1
