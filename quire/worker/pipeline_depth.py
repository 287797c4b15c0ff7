"""How many steps of a worker may be in flight. Imports no torch: executors ask before it is there."""

MAX_STEPS_IN_FLIGHT = 2
"""Steps that may be launched before the oldest one's result is taken: one runs, the next one waits behind it. Whatever
steps use in turn is not used again before that.
"""
