"""How many steps of one worker may be under way. Imports no torch: executors ask before it is there."""

MAX_STEPS_IN_FLIGHT = 2
"""Steps that may be launched before the oldest of them has been looked at: one computes, the next one waits behind it.
Whatever steps use in turns is not used again before that.
"""
