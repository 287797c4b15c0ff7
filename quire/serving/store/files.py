"""Files of /v1/files, kept in parts so that no file is ever in memory as a whole."""

from __future__ import annotations

import asyncio
import sqlite3
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Literal

from quire.errors import PayloadTooLarge, RequestError
from quire.foundation.clock import Clock
from quire.serving.store.database import Database
from quire.serving.store.limits import StoreLimits, UnknownIdError

PART_BYTES = 2**18
_COLUMNS = "id, created, expires, filename, purpose, size"


@dataclass(frozen=True)
class StoredFile:
    """What is known about a file. Times are seconds since 1970, and sizes are in bytes."""

    id: str
    created: int
    expires: int
    filename: str
    purpose: str
    size: int


@dataclass
class FileStore:
    """The files in a store. ResponseStore describes the attributes."""

    database: Database
    limits: StoreLimits
    clock: Clock

    async def create(
        self, filename: str, purpose: str, parts: AsyncIterator[bytes], lifetime: float | None = None
    ) -> StoredFile:
        """Write a file from parts; others see it when it is complete. It is deleted after `lifetime` seconds: by
        default, and at most, the store's. Raises PayloadTooLarge if it is larger than a file may be, and StoreFullError
        if there is no room."""
        file = await self.database.write(lambda c: begin_file(c, self.limits, self.clock, filename, purpose, lifetime))
        try:
            async for part in parts:
                await self.database.write(lambda c, part=part: append(c, self.limits, file.id, part))  # type: ignore[misc]
            await self.database.write(lambda c: complete(c, file.id))
        except BaseException:
            await self.database.write(lambda c: c.execute("DELETE FROM files WHERE id = ?", (file.id,)))
            raise
        return await self.get(file.id)

    async def get(self, asked: str) -> StoredFile:
        """A file by its id; raises UnknownIdError."""
        return await self.database.read(lambda connection: file_of(connection, asked))

    async def page(
        self, *, purpose: str | None, after: str | None, limit: int, order: Literal["asc", "desc"]
    ) -> tuple[Sequence[StoredFile], bool]:
        """Files in the order in which they came, from the one behind `after` on, and whether there are more. Raises
        UnknownIdError if there is no file `after`."""
        sign, direction = (">", "ASC") if order == "asc" else ("<", "DESC")

        def find(connection: sqlite3.Connection) -> list[StoredFile]:
            where, values = ["complete"], list[object]()
            if purpose is not None:
                where.append("purpose = ?")
                values.append(purpose)
            if after is not None:
                file_of(connection, after, "after")
                where.append(f"rowid {sign} (SELECT rowid FROM files WHERE id = ?)")
                values.append(after)
            query = f"SELECT {_COLUMNS} FROM files WHERE {' AND '.join(where)} ORDER BY rowid {direction} LIMIT ?"
            return [StoredFile(*row) for row in connection.execute(query, (*values, limit + 1))]

        found = await self.database.read(find)
        return found[:limit], len(found) > limit

    async def parts(self, asked: str) -> AsyncIterator[bytes]:
        """The contents of a file, part by part."""
        query = "SELECT number, data FROM file_parts WHERE file = ? AND number > ? ORDER BY number LIMIT 1"
        number = -1
        while True:
            row = await self.database.read(lambda c: c.execute(query, (asked, number)).fetchone())  # noqa: B023
            if row is None:
                return
            number, data = row
            yield data

    async def lines(self, asked: str, max_bytes: int) -> AsyncIterator[list[tuple[int, bytes]]]:
        """The lines of a file that are not blank, with their numbers from 0, some at a time.

        Of a line longer than `max_bytes` only one byte more is kept. A thread finds the lines, so the event loop is
        free however many there are.
        """
        lines = _Lines(max_bytes)
        async for part in self.parts(asked):
            if found := await asyncio.to_thread(lines.add, part):
                yield found
        if found := lines.end():
            yield found

    async def delete(self, asked: str) -> None:
        """Delete a file. Raises UnknownIdError if there is none, and RequestError if a batch still reads it."""

        def remove(connection: sqlite3.Connection) -> None:
            file_of(connection, asked)
            query = "SELECT id FROM batches WHERE input_file = ? AND status IN ('validating', 'in_progress')"
            if row := connection.execute(query, (asked,)).fetchone():
                raise RequestError(f"The file is the input of batch {row[0]}: cancel that first.", param="file_id")
            connection.execute("DELETE FROM files WHERE id = ?", (asked,))

        await self.database.write(remove)


class _Lines:
    """Joins lines from parts. Each part is copied once, however long a line is; see FileStore.lines for `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self._max_kept = max_bytes + 1
        self._number = 0
        self._begun: list[bytes] = []
        self._size = 0  # bytes of the line that is begun

    def add(self, part: bytes) -> list[tuple[int, bytes]]:
        """The lines that end in this part."""
        first, *others = part.split(b"\n")
        self._begin(first)
        found = []
        for piece in others:
            found += self.end()
            self._begin(piece)
        return found

    def end(self) -> list[tuple[int, bytes]]:
        """The line that is begun, unless it is blank."""
        number, line = self._number, b"".join(self._begun)
        self._number, self._begun, self._size = number + 1, [], 0
        return [(number, line)] if line.strip() else []

    def _begin(self, piece: bytes) -> None:
        if kept := piece[: self._max_kept - self._size]:
            self._begun.append(kept)
            self._size += len(kept)


def begin_file(
    connection: sqlite3.Connection,
    limits: StoreLimits,
    clock: Clock,
    filename: str,
    purpose: str,
    lifetime: float | None = None,
    batch: str | None = None,
) -> StoredFile:
    """Begin an empty file that nobody sees before it is complete."""
    now = int(clock.now())
    expires = now + int(limits.max_age if lifetime is None else min(limits.max_age, lifetime))
    file = StoredFile(f"file-{uuid.uuid4().hex}", now, expires, filename, purpose, 0)
    values = (file.id, now, expires, filename, purpose, batch)
    connection.execute(f"INSERT INTO files ({_COLUMNS}, complete, batch) VALUES (?, ?, ?, ?, ?, 0, 0, ?)", values)
    return file


def append(connection: sqlite3.Connection, limits: StoreLimits, file: str, data: bytes) -> None:
    """Add to the end of a file. Raises PayloadTooLarge if it gets too large, and StoreFullError if there is no room."""
    limits.make_room(connection, len(data) + len(data) // 64 + 512)
    connection.execute(
        "INSERT INTO file_parts SELECT ?, coalesce(max(number) + 1, 0), ? FROM file_parts WHERE file = ?",
        (file, data, file),
    )
    query = "UPDATE files SET size = size + ? WHERE id = ? RETURNING size, batch"
    ((size, batch),) = connection.execute(query, (len(data), file)).fetchall()
    if batch is None and size > limits.max_file_bytes:
        raise PayloadTooLarge(
            f"A file may have at most {limits.max_file_bytes} bytes (--responses-store-max-file-bytes).", param="file"
        )


def complete(connection: sqlite3.Connection, file: str) -> None:
    """Let others see the file from now on."""
    connection.execute("UPDATE files SET complete = 1 WHERE id = ?", (file,))


def file_of(connection: sqlite3.Connection, asked: str, param: str = "file_id") -> StoredFile:
    """A file by its id; raises UnknownIdError."""
    row = connection.execute(f"SELECT {_COLUMNS} FROM files WHERE id = ? AND complete", (asked,)).fetchone()
    if row is None:
        raise UnknownIdError.of("file", asked, param)
    return StoredFile(*row)
