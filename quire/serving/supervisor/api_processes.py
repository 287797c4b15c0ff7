"""The API processes of a server: which lives each has had. All take connections from one listening socket.

Decides nothing. A process has a place, which its successors take over, and a number, which nobody had before: so
nothing that was meant for one life reaches another.
"""

from __future__ import annotations

import msgspec

from quire.foundation.processes.child import Child
from quire.foundation.processes.launch import LaunchConfig, api_name


class ApiProcesses:
    """API processes by their places.

    Args:
        count: How many there are.

    Attributes:
        numbers: Of the present lives.
        children: The present processes; one that is to be replaced may be dead.
    """

    def __init__(self, count: int) -> None:
        self.numbers = list(range(count))
        self.children: list[Child] = []
        self._next_number = count

    @property
    def places(self) -> range:
        """The places of all API processes."""
        return range(len(self.numbers))

    def name(self, place: int) -> str:
        """What a process is called in messages."""
        return api_name(place, len(self.numbers))

    def place_of(self, child: Child) -> int | None:
        """Which of the present processes this is; None: none of them."""
        return next((place for place, api in enumerate(self.children) if api is child), None)

    @property
    def all_gone(self) -> bool:
        """Whether no API process runs."""
        return all(child.exit_code() is not None for child in self.children)

    def launch(self, place: int, model: LaunchConfig) -> LaunchConfig:
        """What a process is told that serves this model."""
        return msgspec.structs.replace(
            model,
            number=self.numbers[place],
            place=place,
            restarts=self._next_number - len(self.numbers),
            takes_orders=True,
        )

    def begin_next_life(self, place: int) -> int:
        """Give a place to another process; returns the number of the one before."""
        before, self.numbers[place] = self.numbers[place], self._next_number
        self._next_number += 1
        return before
