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
        self._alone: set[Request] = set()

    def note(self, request: Request, count: int) -> None:
        """A planned step fills blocks of it, by so many tokens."""
        self._unpublished.append(request)
        if count == 1:
            self._alone.add(request)

    def catch_up(self, planning: bool = False) -> None:
        """All that was noted is found from now on. Comes before anything is looked up, also by another row of the same
        step, whose keys are written before any is read; else it can wait until a step is under way.

        Args:
            planning: A step is being planned. What a single token fills is not found in it: where all rows have one,
                they are served by a kernel that writes and reads at once.
        """
        later = self._alone if planning else set()
        for request in self._unpublished:
            if request.slot is not None and request not in later:  # without a slot, this was done when it lost it
                self.publish(request)
        self._unpublished = [request for request in self._unpublished if request in later]
        self._alone = set(self._unpublished)

    def publish(self, request: Request) -> None:
        """Its full blocks are found from now on."""
        if self.enabled:
            filled = min(request.planned, len(request.tokens))
            hashes = request.hashes.upto(request.tokens, filled)
            request.table.publish(hashes, filled)
