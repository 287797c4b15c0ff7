"""When the blocks that requests fill enter the prefix cache.

Knows nothing about slots or the order of requests.
"""

from __future__ import annotations

from quire.scheduling.scheduler.request import Request


class PrefixCacher:
    """Caches the full blocks of requests.

    Args:
        enabled: Whether requests share what others have computed.
    """

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self._pending: list[Request] = []

    def add_pending(self, request: Request) -> None:
        """A planned step fills blocks of it, which `cache_pending` is to cache."""
        self._pending.append(request)

    def cache_pending(self) -> None:
        """Cache the blocks of pending requests. Done before every lookup, since even a row of the same step may share
        them (each layer writes its keys before it reads any); otherwise while the device runs a step.
        """
        for request in self._pending:
            if request.slot is not None:  # a preempted or finished request was cached when it lost its slot
                self.cache_blocks(request)
        self._pending.clear()

    def cache_blocks(self, request: Request) -> None:
        """Its full blocks can be found from now on."""
        if self.enabled:
            filled = min(request.planned, len(request.tokens))
            hashes = request.block_hashes.hash_up_to(request.tokens, filled)
            request.table.cache_blocks(hashes, filled)
