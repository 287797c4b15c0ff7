"""Running a coroutine from a callback, for as long as it does not have to wait."""

from __future__ import annotations

import types
from collections.abc import Awaitable, Generator
from typing import Any


def start_eagerly(work: Awaitable[None]) -> Awaitable[None] | None:
    """Run a coroutine right here up to its first suspension.

    An ASGI server's `send` is a coroutine, but it suspends only while the socket's buffer is full; nearly always it
    writes and returns. A callback has no task to await it in, and a new task would cost a turn of the event loop for
    each token. So this does by hand what a task does first: it asks the coroutine for the first future that it waits
    for. (From Python 3.12 on asyncio has this as `eager_start`.)

    Returns:
        None if the coroutine has finished; else the rest of it, to be awaited in a task.
    """
    steps = work.__await__()
    try:
        future = next(steps)
    except StopIteration:
        return None
    return _finish(future, steps)


@types.coroutine
def _finish(future: Any, steps: Generator[Any, Any, None]) -> Generator[Any, Any, None]:
    """Wait for the future on which the coroutine was suspended, then run the rest of the coroutine."""
    try:
        yield future  # the awaiting task goes on behind this line when the future is done
    except BaseException:  # that task was cancelled
        steps.close()
        raise
    yield from steps
