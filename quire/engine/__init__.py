"""The engine: the loop that turns messages into plans and results into messages, and the two ways to reach it."""
