"""Which processes are alive: one that is not works on nothing, so another may take over."""

from __future__ import annotations

import sqlite3
import uuid

from quire.serving.store.database import Database
from quire.serving.store.limits import PROCESS_DEAD_S

ALIVE = f"SELECT id FROM processes WHERE seen > ? - {PROCESS_DEAD_S}"
"""Query for the ids of processes that are alive; its argument is the time now."""


class ProcessRecord:
    """What the store knows about this process.

    Attributes:
        id: Unique over restarts.
    """

    def __init__(self, database: Database) -> None:
        self.id = uuid.uuid4().hex
        self._database = database

    async def say_alive(self, now: float) -> None:
        """Record that this process is alive. While it works on something, call this more often than every
        PROCESS_DEAD_S."""
        await self._database.write(lambda connection: self.say_alive_in(connection, now))

    def say_alive_in(self, connection: sqlite3.Connection, now: float) -> None:
        """Record that this process is alive, in a transaction that is open."""
        connection.execute("INSERT OR REPLACE INTO processes VALUES (?, ?)", (self.id, now))

    async def say_gone(self) -> None:
        """Let other processes take over at once what this one has not finished."""
        await self._database.write(lambda c: c.execute("DELETE FROM processes WHERE id = ?", (self.id,)))
