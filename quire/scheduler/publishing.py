"""Which blocks can be found: those that planned steps fill, told to the pool when somebody could look for them.

Knows nothing about slots or the order of requests.
"""

from __future__ import annotations

from quire.scheduler.request import Request


class Publisher:
    """Tells the pool what requests' blocks hold.

    Args:
        enabled: Whether requests share what others have computed.
    """

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self._unpublished: list[Request] = []

    def note(self, request: Request) -> None:
        """A planned step fills blocks of it."""
        self._unpublished.append(request)

    def catch_up(self) -> None:
        """All that was noted is found from now on. Comes before anything is looked up, also by another row of the same
        step, whose keys are written before any is read; else it can wait until a step is under way.
        """
        for request in self._unpublished:
            if request.slot is not None:  # else this was done when it lost it
                self.publish(request)
        self._unpublished.clear()

    def publish(self, request: Request) -> None:
        """Its full blocks are found from now on."""
        if self.enabled:
            filled = min(request.planned, len(request.tokens))
            hashes = request.hashes.upto(request.tokens, filled)
            request.table.publish(hashes, filled)
