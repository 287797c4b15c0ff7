"""What the store may hold: how much, for how long, what is evicted when there is no room, and what is refused."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

from quire.errors import NotFoundError, PayloadTooLarge

ABANDONED_S = 3_600.0
"""Seconds after which a file whose upload has not ended is deleted."""
PROCESS_DEAD_S = 12.0
"""Seconds after which a process that has not said that it is alive counts as gone."""
EVICTED_AT_ONCE = 16
FINISHED = ("completed", "failed", "incomplete", "cancelled")
"""States of a response on which nobody works. Only these responses are evicted."""
_FINISHED = ", ".join(f"'{status}'" for status in FINISHED)


class StoreFullError(PayloadTooLarge):
    """There is no room, and nothing that may be evicted."""

    code = "store_full"

    @classmethod
    def of(cls, max_bytes: int) -> StoreFullError:
        return cls(
            f"The store is full: responses, files and batches may take {max_bytes} bytes "
            "(--responses-store-max-bytes). Delete files that are no longer needed."
        )


class UnknownIdError(NotFoundError):
    """The response, file or batch does not exist; it may have been evicted."""

    code = "not_found"

    @classmethod
    def of(cls, kind: str, asked: str, param: str | None = None) -> UnknownIdError:
        return cls(f"There is no {kind} '{asked[:128]}'. It may have expired or been deleted.", param=param)


@dataclass(frozen=True)
class StoreLimits:
    """Bounds of one store: bytes of everything together, seconds after which a file, a finished batch or a response
    that nobody uses is deleted, and bytes of one file."""

    max_bytes: int
    max_age: float
    max_file_bytes: int

    def make_room(self, connection: sqlite3.Connection, needed: int) -> None:
        """Evict the responses that were not used for the longest time until `needed` bytes fit. Files and batches stay:
        somebody waits for them. Raises StoreFullError if there is no room without finished responses."""
        while used_bytes(connection) + needed > self.max_bytes:
            oldest = f"SELECT id FROM responses WHERE status IN ({_FINISHED}) ORDER BY used LIMIT {EVICTED_AT_ONCE}"
            if connection.execute(f"DELETE FROM responses WHERE id IN ({oldest})").rowcount == 0:
                raise StoreFullError.of(self.max_bytes)

    def sweep(self, connection: sqlite3.Connection, now: float) -> None:
        """Delete what is too old at this time, in seconds since 1970."""
        before = now - self.max_age
        connection.execute(f"DELETE FROM responses WHERE used < ? AND status IN ({_FINISHED})", (before,))
        connection.execute(
            "DELETE FROM batches WHERE created < ? AND status IN ('completed', 'failed', 'expired', 'cancelled')",
            (before,),
        )
        needed = "SELECT input_file FROM batches WHERE status IN ('validating', 'in_progress')"
        connection.execute(f"DELETE FROM files WHERE complete AND expires < ? AND id NOT IN ({needed})", (now,))
        connection.execute(
            "DELETE FROM files WHERE NOT complete AND created < ? AND batch IS NULL", (now - ABANDONED_S,)
        )
        connection.execute("DELETE FROM processes WHERE seen < ?", (before,))
        connection.execute("PRAGMA incremental_vacuum").fetchall()


def used_bytes(connection: sqlite3.Connection) -> int:
    names = ("page_count", "freelist_count", "page_size")
    pages, free, size = (int(connection.execute(f"PRAGMA {name}").fetchone()[0]) for name in names)
    return (pages - free) * size
