"""Batches as rows of the store: what is kept of a batch, and how it is read and changed within a transaction."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from typing import Any

import msgspec

from quire.serving.store.limits import UnknownIdError


@dataclass(frozen=True)
class BatchResult:
    """The result of the request on a line of the input file, counted from 0: `data` is a line, without its end, of the
    output file if the request succeeded, or else of the file of errors."""

    line: int
    succeeded: bool
    data: bytes


@dataclass(frozen=True)
class ClaimedBatch:
    """A batch that this process works on now, as clients see it in `body`; `ends_as` tells how, if it is being ended.
    `tenant` is whose batch it is; see Add."""

    body: dict[str, Any]
    ends_as: str | None
    tenant: str = ""


def body_of(connection: sqlite3.Connection, batch: str) -> dict[str, Any]:
    """The batch as it is kept. Raises UnknownIdError if there is no such batch."""
    row = connection.execute("SELECT body FROM batches WHERE id = ?", (batch,)).fetchone()
    if row is None:
        raise UnknownIdError.of("batch", batch, "batch_id")
    body: dict[str, Any] = msgspec.json.decode(row[0])
    return body


def seen(connection: sqlite3.Connection, batch: str) -> dict[str, Any]:
    """The batch as clients see it, with its counts. Raises UnknownIdError if there is no such batch."""
    body = body_of(connection, batch)
    (total,) = connection.execute("SELECT total FROM batches WHERE id = ?", (batch,)).fetchone()
    query = "SELECT coalesce(sum(succeeded), 0), count(*) FROM batch_results WHERE batch = ?"
    completed, done = connection.execute(query, (batch,)).fetchone()
    counts = {"total": total, "completed": completed, "failed": done - completed}
    body["request_counts"] = body.pop("final_counts", None) or counts
    for internal in ("ends_as", "output_lifetime", "tenant"):
        body.pop(internal, None)
    return body


def set_fields(connection: sqlite3.Connection, batch: str, **changes: Any) -> None:
    body = {**body_of(connection, batch), **changes}
    connection.execute("UPDATE batches SET status = ?, body = ? WHERE id = ?", (body["status"], encode(body), batch))


def encode(body: dict[str, Any]) -> bytes:
    return msgspec.json.encode(body)
