"""Responses of /v1/responses as JSON, and the events of those that run in the background."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass

from quire.errors import RequestError
from quire.foundation.clock import Clock
from quire.serving.store.database import ALIVE, Database, ProcessRecord
from quire.serving.store.limits import StoreLimits, UnknownIdError

MAX_TURNS = 1_000
"""Maximum number of responses that continue each other."""
ROW_BYTES = 512
"""Bytes for a row beside its texts."""


@dataclass(frozen=True)
class StoredResponse:
    """One response: JSON of its input items, without those of the responses before it, and JSON of the response itself.
    `abandoned` tells that it has not ended and the process that worked on it is gone."""

    id: str
    status: str
    input: bytes
    body: bytes
    previous: str | None
    abandoned: bool = False


@dataclass(frozen=True)
class StoredEvents:
    """Events of a response, in order. `last` tells that no more will follow, and `abandoned` that this is because the
    process that worked on the response is gone."""

    events: Sequence[tuple[int, bytes]]
    last: bool
    abandoned: bool = False


@dataclass
class ResponseStore:
    """The responses in a database. `process` is the owner of what runs in the background, `clock` has seconds since
    1970."""

    database: Database
    limits: StoreLimits
    process: ProcessRecord
    clock: Clock

    async def put(self, response: StoredResponse, *, running: bool = False) -> None:
        """Add a response, `running` if this process still works on it. Raises StoreFullError if there is no room."""
        now = self.clock.now()

        def insert(connection: sqlite3.Connection) -> None:
            self.limits.make_room(connection, len(response.input) + len(response.body) + ROW_BYTES)
            if running:
                self.process.say_alive(connection, now)
            owner = self.process.id if running else None
            values = (response.id, now, response.status, response.previous, response.input, response.body, owner)
            connection.execute("INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?)", values)

        await self.database.write(insert)

    async def get(self, asked: str) -> StoredResponse:
        """A response by its id; raises UnknownIdError."""
        return await self.database.read(lambda connection: self._one(connection, asked))

    async def turns(self, last: str) -> list[StoredResponse]:
        """A response and those that it continues, the first one first. They count as used now. Raises UnknownIdError if
        one of them no longer exists, and RequestError if there are more than MAX_TURNS."""
        now = self.clock.now()

        def find(connection: sqlite3.Connection) -> list[StoredResponse]:
            found: list[StoredResponse] = []
            previous: str | None = last
            while previous is not None:
                if len(found) == MAX_TURNS:
                    raise RequestError(
                        f"The conversation has more than {MAX_TURNS} turns: send its items as input instead.",
                        param="previous_response_id",
                    )
                found.append(self._one(connection, previous, "previous_response_id"))
                previous = found[-1].previous
            connection.executemany("UPDATE responses SET used = ? WHERE id = ?", [(now, each.id) for each in found])
            return found[::-1]

        return await self.database.write(find)

    async def update(
        self, asked: str, status: str, body: bytes | None, events: Sequence[tuple[int, bytes]] = ()
    ) -> bool:
        """Write down how far a running response is, and its next events. A body of None is unchanged.

        Returns whether the response is still wanted: neither deleted nor cancelled.
        """

        def change(connection: sqlite3.Connection) -> bool:
            row = connection.execute("SELECT status FROM responses WHERE id = ?", (asked,)).fetchone()
            if row is None or row[0] == "cancelled":
                return False
            self.limits.make_room(connection, len(body or b"") + sum(len(data) + 64 for _, data in events))
            owner = None
            if status in ("queued", "in_progress"):
                owner = self.process.id
                self.process.say_alive(connection, self.clock.now())
            connection.execute(
                "UPDATE responses SET status = ?, body = coalesce(?, body), owner = ? WHERE id = ?",
                (status, body, owner, asked),
            )
            rows = ((asked, number, data) for number, data in events)
            connection.executemany("INSERT INTO response_events VALUES (?, ?, ?)", rows)
            return True

        return await self.database.write(change)

    async def end(self, asked: str, status: str, body: bytes) -> bool:
        """End a response. A process that works on it sees so at its next `update`. Returns whether it had not ended."""
        statement = (
            "UPDATE responses SET status = ?, body = ?, owner = NULL "
            "WHERE id = ? AND status IN ('queued', 'in_progress')"
        )
        done = await self.database.write(lambda connection: connection.execute(statement, (status, body, asked)))
        return done.rowcount > 0

    async def events(self, asked: str, after: int) -> StoredEvents:
        """Events of a response with numbers above `after`; raises UnknownIdError."""

        def find(connection: sqlite3.Connection) -> StoredEvents:
            response = self._one(connection, asked)
            query = "SELECT number, data FROM response_events WHERE response = ? AND number > ? ORDER BY number"
            rows = connection.execute(query, (asked, after)).fetchall()
            ended = response.status not in ("queued", "in_progress")
            return StoredEvents(rows, ended or response.abandoned, response.abandoned)

        return await self.database.read(find)

    async def delete(self, asked: str) -> None:
        """Forget a response; raises UnknownIdError."""

        def remove(connection: sqlite3.Connection) -> None:
            if connection.execute("DELETE FROM responses WHERE id = ?", (asked,)).rowcount == 0:
                raise UnknownIdError.of("response", asked)

        await self.database.write(remove)

    def _one(self, connection: sqlite3.Connection, asked: str, param: str = "response_id") -> StoredResponse:
        query = (
            f"SELECT id, status, input, body, previous, owner IS NOT NULL AND owner NOT IN ({ALIVE}) "
            "FROM responses WHERE id = ?"
        )
        row = connection.execute(query, (self.clock.now(), asked)).fetchone()
        if row is None:
            raise UnknownIdError.of("response", asked, param)
        name, status, items, body, previous, abandoned = row
        return StoredResponse(name, status, items, body, previous, bool(abandoned))
