"""Finds the request that kills engines: which requests may run after a death, and when one is to blame.

After a first death everything runs again. If the engine dies again before the requests of its last plan have moved on,
one of them is suspected, and these run in halves: one half is on trial, everything else waits. A half that moves on is
acquitted; when the engine dies, one of those on trial did it. So log2(n) + 2 deaths find one of n. Decides only; knows
neither engines nor tokens.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class PoisonSearch(Generic[K]):
    """What is known about the requests that were being worked on when the engine died.

    Attributes:
        searching: Whether only some may run, see `may_run`.
    """

    def __init__(self) -> None:
        self._suspects: list[K] = []  # one of these may have done it; those on trial come first
        self._on_trial: set[K] = set()  # of the suspects; all of them after a first death
        self._moved: set[K] = set()  # acquitted while searching
        self.searching = False

    @property
    def unproven(self) -> bool:
        """Whether some suspect has not moved on yet."""
        return bool(self._suspects)

    def may_run(self, request: K) -> bool:
        """Whether a request may be on the engine now."""
        return not self.searching or request in self._on_trial or request in self._moved

    def is_on_trial(self, request: K) -> bool:
        """Whether the search waits for this request to move on."""
        return request in self._on_trial

    def engine_died(self, in_flight: Iterable[K], *, alone: bool = True) -> K | None:
        """Record that an engine died while it worked on these requests. Returns the one to blame if it is found, which
        ends the search.

        Args:
            alone: Whether one of these did it, and not a request that is unknown here. Else nobody is blamed yet.
        """
        running = list(dict.fromkeys(in_flight))
        accused = [request for request in running if request in self._on_trial]
        if not accused:
            if running:  # a first death, or one that says that the search was on the wrong track
                self._accuse(running, searching=False)
            return None
        if alone and self._on_trial == set(accused) and len(accused) == 1:
            self._close()
            return accused[0]
        self._accuse(accused, searching=True)
        return None

    def moved(self, request: K) -> bool:
        """Record that a request has moved on, or is over. Returns whether others may run now that could not before."""
        if request not in self._on_trial:
            self._suspects = [suspect for suspect in self._suspects if suspect != request]
            return False
        self._on_trial.discard(request)
        self._moved.add(request)
        self._suspects.remove(request)
        if self._on_trial:
            return False
        if not self._suspects:
            was_searching = self.searching
            self._close()
            return was_searching
        self._try_half()
        return True

    def acquit_all(self) -> None:
        """Acquit all suspects: the request that killed the engine is none of these."""
        self._close()

    def _accuse(self, suspects: list[K], *, searching: bool) -> None:
        self._suspects, self.searching = suspects, searching
        self._moved.clear()
        if searching:
            self._try_half()
        else:
            self._on_trial = set(suspects)

    def _try_half(self) -> None:
        self._on_trial = set(self._suspects[: -(-len(self._suspects) // 2)])

    def _close(self) -> None:
        self._suspects, self._on_trial, self.searching = [], set(), False
        self._moved.clear()
