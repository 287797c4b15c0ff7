"""How many steps may be in flight. Imports no torch: executors ask before it is there."""

MAX_STEPS_IN_FLIGHT = 2
"""Steps that may be launched before the oldest one's result is taken: one runs, the next one waits behind it. Whatever
steps use in turn is not used again before that.
"""


def most_in_flight(stages: int) -> int:
    """How many steps may be in flight in an engine whose model is divided into stages: one in each stage, and one that
    waits."""
    return MAX_STEPS_IN_FLIGHT + stages - 1
