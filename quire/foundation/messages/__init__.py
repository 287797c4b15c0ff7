"""Every struct that crosses a process while it serves, and its cost; `processes/launch.py` has those of its start.

- `to_engine.py`: from an API process to an engine. A request is one message.
- `workers.py`: between an engine and its workers. A step is one Plan and one Result.
- `from_engine.py`: from an engine to API processes. A step is one Deltas for each of them.

These are all, whatever the batch size. Plain data for msgspec over ZMQ, a direct call or shared memory; no torch, no
I/O. Columns, not objects: a plan of 256 rows is a few hundred bytes. Encoded as arrays, so the order of the fields is
the wire format.
"""
