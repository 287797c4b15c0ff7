"""A child process as its parent sees it. Tests and simulations bring their own."""

from __future__ import annotations

import signal
from typing import Protocol

from quire.foundation.processes.launch import Report, StatusReport
from quire.foundation.processes.orders import Order


class Child(Protocol):
    """A process that was started.

    Attributes:
        name: Its name in messages: `engine`, `api`.
        failure: Its last report, if it failed.
        report_fd: Readable when it has reported something.
        pid_fd: Readable when it is gone.
    """

    name: str
    failure: StatusReport | None
    report_fd: int
    pid_fd: int

    @property
    def pid(self) -> int: ...

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
        """The code as in subprocess: None while it runs, negative if a signal ended it."""
        ...

    def cause_of_death(self) -> str:
        """Wait for its end; returns why it is gone, in one line without a full stop."""
        ...

    def close(self) -> None:
        """Close the descriptors."""
        ...
