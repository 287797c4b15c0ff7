"""Deterministic simulation: a whole server on a virtual clock, with faults from a seed and invariants at every step.

Supervisor, engine loop, scheduler, KV bookkeeping and API session are the real ones. Simulated are the executor, the
sockets between processes, the processes themselves, and time. `python -m tests.simulation --help` runs many seeds.
"""
