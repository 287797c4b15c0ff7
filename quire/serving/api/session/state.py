"""Whether a server takes requests, and what it says where it does not. Knows no request."""

from __future__ import annotations

from typing import Literal

from quire.serving.api.session.connection import DEAD, LOADING, RECOVERING
from quire.serving.api.session.engines import Engines

NEW_WORK_WAIT_S = 20.0
"""Seconds for which new requests are taken while an engine takes the place of one that died; then they are refused."""
State = Literal["starting", "ready", "recovering", "swapping", "draining", "dead"]
REFUSALS: dict[State, str] = {
    "starting": LOADING,
    "recovering": RECOVERING,
    "swapping": "Another model is being loaded. Send the request again in a few seconds.",
    "draining": "The server is shutting down. Send the request to another one, or again later.",
    "dead": DEAD,
}
"""The error message for a request in each state in which none is taken."""


class SessionState:
    """What the state of the engines and of the server mean for requests."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._leaving = ""  # why requests should go elsewhere, though they are taken
        self._retired = False
        self.draining = self.closed = False

    def announce_shutdown(self) -> None:
        """Report the server as not ready because it shuts down; requests are still taken."""
        self._leaving = "the server is shutting down"

    def announce_swap(self) -> None:
        """Report the server as not ready because another model is being loaded; requests are still taken."""
        self._leaving = "another model is being loaded"

    def drain(self) -> None:
        """Take no new work."""
        self.draining = True
        if not self._leaving:
            self.announce_shutdown()

    def retire(self) -> None:
        """Take no new work for good, because another model has taken this one's place."""
        self._retired = True
        self.announce_swap()
        self.drain()

    @property
    def current(self) -> State:
        """starting → ready ⇄ recovering → draining → dead; swapping once another model takes its place."""
        if not self.draining or self._engines.state == "dead":
            return self._engines.state
        return self.ending

    @property
    def ending(self) -> Literal["swapping", "draining"]:
        """Why open requests are ended, if they are."""
        return "swapping" if self._retired else "draining"

    @property
    def takes_requests(self) -> bool:
        """Whether new requests are taken, also while one engine takes another's place."""
        state = self.current
        return state == "ready" or (state == "recovering" and self._engines.recovering_s < NEW_WORK_WAIT_S)

    @property
    def drains_on(self) -> bool:
        """Whether requests that were taken before a drain can still go on."""
        return self.draining and self._engines.state != "dead" and not self.closed

    @property
    def refusal(self) -> str:
        """The error message for a request that is not taken now."""
        state = self.current
        return REFUSALS["starting" if state == "ready" else state]

    @property
    def health_complaint(self) -> str:
        """Why the server is not alive or makes no progress; empty if an engine is well, or another model is loaded."""
        return "" if self._retired else self._engines.complaint

    @property
    def readiness_complaint(self) -> str:
        """Why a request would not be accepted and finished now; empty if it would."""
        return self._leaving or self._engines.complaint
