"""Under which key Triton keeps a compilation on disk: the same in every process, whatever was launched first.

Triton's key of a function says which constants it reads, and which the functions read that it calls. Triton 3.6 takes
the latter from what it knows of these functions already, which is nothing until their own keys have been made: a kernel
compiled before another that calls the same function, or after it, had different keys, and threads that compile side by
side made that a matter of luck. So keys are made from the inside out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from triton.runtime.jit import JITCallable


def make_cache_key(function: JITCallable, met: set[Callable[..., Any]] | None = None) -> None:
    """Let Triton make this function's key after those of all that it calls. Any threads may do so at the same time.

    Args:
        function: Triton's.
        met: Functions whose keys are made, or are about to be.
    """
    met = set() if met is None else met
    met.add(function.fn)
    for callee in _callees(function):
        if callee.fn not in met:
            make_cache_key(callee, met)
    function.cache_key  # noqa: B018


def _callees(function: JITCallable) -> Iterator[JITCallable]:
    """Those that it knows by name. Triton does not look into its own."""
    for name in function.fn.__code__.co_names:
        if isinstance(found := function.fn.__globals__.get(name), JITCallable):
            yield found
