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
        ...

    def swap_ms(self, blocks: int) -> float:
        """Moving that many blocks to the host and back."""
        ...


class Preemption:
    """Frees the blocks of preempted requests, and brings swapped ones back.

    Args:
        host: Host blocks that are ready; where they are too few, the request is recomputed.
        mode: Always this one, as far as host blocks last; None for the cheaper one each time.
        cost: Estimates for mode None; without it, everything is recomputed.
    """

    def __init__(self, host: HostPool, mode: PreemptionMode | None = None, cost: PreemptionCost | None = None) -> None:
        self.host = host
        self._mode = mode
        self._cost = cost

    def preempt(self, request: Request, step: Step | None) -> None:
        """Free its blocks within `step`; without one, it is computed again whatever the mode. The caller frees its
        slot."""
        request.preemptions += 1
        if step is not None and self._should_swap(request):
            self._swap_out(request, step)
        else:
            request.table.free()
            request.reset_computed()

    def _swap_out(self, request: Request, step: Step) -> None:
        """Move a request's blocks to the host."""
        step.swap_out += request.table.swap_out(self.host.allocate(request.table.num_blocks))
        request.swapped = True

    def swap_in(self, request: Request, step: Step) -> bool:
        """Move a swapped request's blocks to the device again; False (and nothing allocated) when there is no room."""
        pairs = request.table.swap_in()
        if pairs is None:
            return False
        step.swap_in += pairs
        self.host.free(host for host, _ in pairs)
        request.swapped = False
        return True

    def free_swapped(self, request: Request) -> None:
        """Free the host blocks of a swapped request that is over."""
        self.host.free(request.table.free_swapped())
        request.swapped = False

    def _should_swap(self, request: Request) -> bool:
        blocks = request.table.num_blocks
        if self._mode == "recompute" or not 0 < blocks <= self.host.num_free:
            return False
        if self._mode == "swap" or self._cost is None:
            return self._mode == "swap"
        return self._cost.swap_ms(blocks) < self._cost.recompute_ms(request.planned)
