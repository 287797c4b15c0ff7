"""The API processes of a server, which all take connections from one listening socket.

A process has a place, which its successors take over, and a number of its own, so nothing that was meant for one
process reaches its successor.
"""

from __future__ import annotations

import msgspec

from quire.foundation.processes.child_process import Child
from quire.foundation.processes.launch import LaunchConfig, api_name


class ApiProcesses:
    """The API processes by their places: the number of each present process, and the process itself, which may be dead
    if it is about to be replaced."""

    def __init__(self, count: int) -> None:
        self.numbers = list(range(count))
        self.children: list[Child] = []
        self._next_number = count

    @property
    def places(self) -> range:
        return range(len(self.numbers))

    def name(self, place: int) -> str:
        """The name of a process in messages."""
        return api_name(place, len(self.numbers))

    def place_of(self, child: Child) -> int | None:
        """The place of a present process; None if it is not one of them."""
        return next((place for place, api in enumerate(self.children) if api is child), None)

    @property
    def all_gone(self) -> bool:
        return all(child.exit_code() is not None for child in self.children)

    def launch(self, place: int, model: LaunchConfig) -> LaunchConfig:
        """The launch configuration of a process that serves this model."""
        return msgspec.structs.replace(
            model,
            number=self.numbers[place],
            place=place,
            restarts=self._next_number - len(self.numbers),
            takes_orders=True,
        )

    def begin_next_life(self, place: int) -> int:
        """Give a place to another process. Returns the number of the process before."""
        before, self.numbers[place] = self.numbers[place], self._next_number
        self._next_number += 1
        return before
