"""A child process as its parent sees it: the seam between what watches processes and where they run."""

from __future__ import annotations

import signal
from typing import Protocol

from quire.foundation.processes.launch import Report, StatusReport
from quire.foundation.processes.orders import Order


class Child(Protocol):
    """A process that was started.

    Attributes:
        name: For messages: `engine`, `api`.
        failure: What it reported, if it failed.
        report_fd: Becomes readable when it reports something.
        pid_fd: Becomes readable when it is gone.
    """

    name: str
    failure: StatusReport | None
    report_fd: int
    pid_fd: int

    @property
    def pid(self) -> int:
        """The process id."""
        ...

    def reports(self) -> list[Report]:
        """Reports since the last call."""
        ...

    def tell(self, order: Order) -> None:
        """Give it an order, if it takes any."""
        ...

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, if it still runs."""
        ...

    def kill(self, why: str = "") -> None:
        """End it at once; `why` becomes the cause of its death."""
        ...

    def exit_code(self) -> int | None:
        """As subprocess has it: None while it runs, negative when a signal ended it."""
        ...

    def cause_of_death(self) -> str:
        """Why it is gone, in one line without a full stop; waits for its end."""
        ...

    def close(self) -> None:
        """Close the descriptors."""
        ...
