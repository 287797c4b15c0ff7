"""Taking a running request's slot and blocks back: recompute them later, or keep their contents on the host.

Decides which of the two, by what was asked or by what each would cost. Knows nothing about who is taken.
"""

from __future__ import annotations

from typing import Protocol

from quire.config.scheduler import PreemptionMode
from quire.kvcache.host import HostPool
from quire.scheduler.request import Request
from quire.scheduler.step import Step


class PreemptionCost(Protocol):
    """What the two ways cost on this machine, in milliseconds."""

    def recompute_ms(self, tokens: int) -> float:
        """Computing that many tokens again."""
        ...

    def swap_ms(self, blocks: int) -> float:
        """Moving that many blocks to the host and back."""
        ...


class Preemption:
    """Puts requests back.

    Args:
        host: Host blocks; none of them means that everything is recomputed.
        mode: Always this one, as far as host blocks last; None for the cheaper one each time.
        cost: What it is decided by when `mode` is None; without it, by recomputing.
    """

    def __init__(self, host: HostPool, mode: PreemptionMode | None = None, cost: PreemptionCost | None = None) -> None:
        self.host = host
        self._mode = mode
        self._cost = cost

    def put_back(self, request: Request, step: Step, start_over: bool = False) -> None:
        """Give its blocks back, within the step in the making; to `start_over` is to be recomputed whatever the mode.
        The caller takes its slot."""
        request.preemptions += 1
        if not start_over and self._swaps(request):
            pairs = request.table.swap_out(self.host.take(request.table.num_blocks))
            step.swap_out += pairs
            request.swapped = True
        else:
            request.table.release()
            request.restart()

    def bring_back(self, request: Request, step: Step) -> bool:
        """Move a swapped request's blocks to the device again; False (and nothing taken) when there is no room."""
        pairs = request.table.swap_in()
        if pairs is None:
            return False
        step.swap_in += pairs
        self.host.give_back(host for host, _ in pairs)
        request.swapped = False
        return True

    def drop(self, request: Request) -> None:
        """A swapped request is over."""
        self.host.give_back(request.table.drop_swapped())
        request.swapped = False

    def _swaps(self, request: Request) -> bool:
        blocks = request.table.num_blocks
        if self._mode == "recompute" or not 0 < blocks <= self.host.num_free:
            return False
        if self._mode == "swap" or self._cost is None:
            return self._mode == "swap"
        return self._cost.swap_ms(blocks) < self._cost.recompute_ms(request.planned)
