"""Small and large requests in turns: a crowd of long prompts does not keep a short one waiting.

Knows nothing about tenants, slots, blocks or budgets.
"""

from __future__ import annotations

from collections.abc import Callable

from quire.scheduling.scheduler.queue_order import KeyOrder
from quire.scheduling.scheduler.request import Request

SMALL = 1_024
"""Requests of up to this many tokens are of one size; each further size goes up to four times as many."""


class _Size:
    """The requests of one size that wait.

    Attributes:
        served: Tokens that were admitted of this size, as others count them, see SizeOrder.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.order = KeyOrder()
        self.served = 0


class SizeOrder:
    """Sizes are admitted equally many tokens while requests of several wait; by arrival within one size.

    The next size is the one that was admitted fewest tokens, and the smallest of several (stride scheduling,
    Waldspurger and Weihl 1995). A size that nobody waited in begins where the others are: it saves nothing up. A prompt
    is as large as all its choices together, and each of these is of that size: so very many choices of a short prompt
    keep a short request waiting no longer than a long prompt does.

    Args:
        cost: Of a waiting request, in tokens.
        cost_with_forks: The same of a prompt and all the requests that fork from it.

    Attributes:
        only_small: Whether only the smallest size is looked at.
    """

    def __init__(self, cost: Callable[[Request], int], cost_with_forks: Callable[[Request], int]) -> None:
        self._cost = cost
        self._cost_with_forks = cost_with_forks
        self._sizes: dict[int, _Size] = {}
        self._size_of: dict[int, _Size] = {}  # by request
        self.only_small = False

    def __len__(self) -> int:
        return len(self._size_of)

    def __contains__(self, request: Request) -> bool:
        return request.id in self._size_of

    @property
    def first(self) -> Request | None:
        found = self._next_size()
        return None if found is None else found.order.first

    def is_small(self, request: Request) -> bool:
        """Whether a request that waits is of the smallest size."""
        return self._size_of[request.id].number == 0

    def skip_first(self) -> None:
        found = self._next_size()
        assert found is not None
        found.order.skip_first()

    def restore_skipped(self) -> None:
        self.only_small = False
        for size in self._sizes.values():
            size.order.restore_skipped()

    def add(self, request: Request) -> None:
        parent = None if request.parent is None else self._size_of.get(request.parent.id)
        size = parent or self._size(_size_number(self._cost_with_forks(request)))
        if not len(size.order):
            busy = [other.served for other in self._sizes.values() if len(other.order)]
            size.served = max(size.served, min(busy, default=0))
        self._size_of[request.id] = size
        size.order.add(request)

    def remove(self, request: Request) -> None:
        size = self._size_of.pop(request.id, None)
        if size is not None:
            size.order.remove(request)

    def admit(self, request: Request) -> None:
        self._size_of[request.id].served += self._cost(request)
        self.remove(request)

    def _size(self, number: int) -> _Size:
        if number not in self._sizes:
            self._sizes[number] = _Size(number)
        return self._sizes[number]

    def _next_size(self) -> _Size | None:
        """The size whose first request is next."""
        if self.only_small:
            return self._sizes.get(0)
        if len(self._sizes) == 1:
            return next(iter(self._sizes.values()))
        waiting = [size for size in self._sizes.values() if size.order.first is not None]
        return min(waiting, key=lambda size: (size.served, size.number), default=None)


def _size_number(tokens: int) -> int:
    """0 up to SMALL, 1 up to four times as many, and so on."""
    number = 0
    while tokens > SMALL << 2 * number:
        number += 1
    return number
