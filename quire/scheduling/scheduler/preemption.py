"""Preemption of a running request: its blocks are swapped to the host, or its tokens are computed again later.

Decides between the two, as configured or by estimated cost. Knows nothing about which request is preempted.
"""

from __future__ import annotations

from typing import Protocol

from quire.foundation.config.scheduler import PreemptionMode
from quire.scheduling.kvcache.block_table import PrefixMatch
from quire.scheduling.kvcache.host_pool import HostPool
from quire.scheduling.kvcache.host_tier import HostTier
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
        cost: Estimates for mode None; without it, everything is recomputed, and whatever the tier has is loaded.
        tier: What keeps the prefix cache beyond the device, in the same host blocks; None: nothing does.
    """

    def __init__(
        self,
        host: HostPool,
        mode: PreemptionMode | None = None,
        cost: PreemptionCost | None = None,
        tier: HostTier | None = None,
    ) -> None:
        self.host = host
        self.tier = tier
        self._mode = mode
        self._cost = cost

    def swap_out(self, request: Request, step: Step) -> None:
        """Move the blocks of a request that is preempted in this step to the host, unless recomputing costs less."""
        if not self._should_swap(request):
            return
        table = request.table
        if self.tier is None:
            step.swap_out += table.swap_out(self.host.allocate(table.num_blocks))
        else:
            hosts, new = self.tier.pin(table.held_blocks(0, table.num_blocks))
            step.swap_out += [pair for pair in table.swap_out(hosts) if pair[1] in new]
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
        let_go = self.host.free if self.tier is None else self.tier.unpin
        let_go(request.table.drop_unseen_swapped(request.planned))
        pairs = request.table.swap_in()
        if pairs is None:
            return False
        step.swap_in += pairs
        let_go(host for host, _ in pairs)
        request.swapped = False
        return True

    def pays(self, near: PrefixMatch, far: PrefixMatch) -> bool:
        """Whether loading what the tier has is quicker than computing it: `near` is the prefix on the device, and `far`
        the one with the tier's blocks."""
        assert self.tier is not None
        if far.num_tokens <= near.num_tokens:
            return False
        if not self.tier.can_load(far.host_blocks):
            return False
        if self._cost is None:
            return True
        computed_ms = self._cost.recompute_ms(far.num_tokens) - self._cost.recompute_ms(near.num_tokens)
        if self.tier.load_ms_of(far.host_blocks) < computed_ms:
            return True
        self.tier.stats.too_slow += 1
        self.tier.disk.was_too_slow()
        return False

    def _should_swap(self, request: Request) -> bool:
        blocks = request.table.num_blocks
        if self._mode == "recompute" or not 0 < blocks <= self.host.num_free:
            return False
        if request.pools:  # what is pooled so far lies in the slot, which others get
            return False
        if self._mode == "swap" or self._cost is None:
            return self._mode == "swap"
        return self._cost.swap_ms(blocks) < self._cost.recompute_ms(request.planned)
