"""Preemption of a running request: its blocks are swapped to the host, or its tokens are computed again later.

Decides between the two, as configured or by estimated cost. Knows nothing about which request is preempted.
"""

from __future__ import annotations

from typing import Protocol

from quire.foundation.config.scheduler import PreemptionMode
from quire.scheduling.kvcache.host_pool import HostPool
from quire.scheduling.scheduler.request import Request
from quire.scheduling.scheduler.step import Step


class PreemptionCost(Protocol):
    """What the two ways cost on this machine, in milliseconds."""

    def recompute_ms(self, tokens: int) -> float:
        """Computing that many tokens again."""

    def swap_ms(self, blocks: int) -> float:
        """Moving that many blocks to the host and back."""


class Preemption:
    """Frees blocks of requests on the device and on the host, and moves blocks between the two.

    Args:
        host: Host blocks that are ready; where they are too few, the request is recomputed.
        mode: What to do as far as host blocks last; None for the cheaper way each time.
        cost: Estimates for mode None; without it, everything is recomputed.
    """

    def __init__(self, host: HostPool, mode: PreemptionMode | None = None, cost: PreemptionCost | None = None) -> None:
        self.host = host
        self._mode = mode
        self._cost = cost

    def swap_out(self, request: Request, step: Step) -> None:
        """Move the blocks of a request that is preempted in this step to the host, unless recomputing costs less."""
        if self._should_swap(request):
            step.swap_out += request.table.swap_out(self.host.allocate(request.table.num_blocks))
            request.swapped = True

    def release(self, request: Request) -> None:
        """Free the request's blocks. One that waits keeps them if they are on the host; otherwise all its tokens are
        computed again."""
        if request.ended is not None and request.swapped:
            self.host.free(request.table.free_swapped())
        elif request.ended is not None:
            request.table.free()
        elif not request.swapped:
            request.table.free()
            request.reset_computed()

    def swap_in(self, request: Request, step: Step) -> bool:
        """Move a swapped request's blocks to the device again; False (and nothing allocated) when there is no room."""
        pairs = request.table.swap_in()
        if pairs is None:
            return False
        step.swap_in += pairs
        self.host.free(host for host, _ in pairs)
        request.swapped = False
        return True

    def _should_swap(self, request: Request) -> bool:
        blocks = request.table.num_blocks
        if self._mode == "recompute" or not 0 < blocks <= self.host.num_free:
            return False
        if self._mode == "swap" or self._cost is None:
            return self._mode == "swap"
        return self._cost.swap_ms(blocks) < self._cost.recompute_ms(request.planned)
