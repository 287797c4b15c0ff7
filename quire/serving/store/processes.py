"""Which processes are alive. A process that is not alive works on nothing, so another may take over."""

from __future__ import annotations

import sqlite3
import uuid

from quire.serving.store.database import Database
from quire.serving.store.limits import PROCESS_DEAD_S

ALIVE = f"SELECT id FROM processes WHERE seen > ? - {PROCESS_DEAD_S}"
"""Query for the ids of processes that are alive. Its argument is the present time."""


class ProcessRecord:
    """The store's record of this process, whose id is unique over restarts."""

    def __init__(self, database: Database) -> None:
        self.id = uuid.uuid4().hex
        self._database = database

    def say_alive(self, connection: sqlite3.Connection, now: float) -> None:
        """Record in a transaction that this process is alive. Do so more often than every PROCESS_DEAD_S."""
        connection.execute("INSERT OR REPLACE INTO processes VALUES (?, ?)", (self.id, now))

    async def say_gone(self) -> None:
        """Let other processes take over at once what this one has not finished."""
        await self._database.write(lambda c: c.execute("DELETE FROM processes WHERE id = ?", (self.id,)))
