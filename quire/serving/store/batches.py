"""Batches of /v1/batches: their states, which process works on each, and the results so far.

A result is written once, when its request has ended, so a batch goes on after a restart where it was.
"""

from __future__ import annotations

import sqlite3
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from quire.errors import RequestError
from quire.foundation.clock import Clock
from quire.serving.store.batch_rows import BatchResult, ClaimedBatch, body_of, encode, seen, set_fields
from quire.serving.store.database import ALIVE, Database, ProcessRecord
from quire.serving.store.files import append, begin_file, complete, file_of
from quire.serving.store.limits import StoreLimits

RESULTS_MOVED_AT_ONCE = 200
OPEN = ("validating", "in_progress", "finalizing", "cancelling")
"""States of a batch on which a process works."""
_OPEN = ", ".join(f"'{status}'" for status in OPEN)
_OUTPUTS = (("output_file_id", 1, "output"), ("error_file_id", 0, "error"))


@dataclass
class BatchStore:
    """The batches in a store. ResponseStore describes the attributes."""

    database: Database
    limits: StoreLimits
    process: ProcessRecord
    clock: Clock

    async def create(
        self,
        *,
        model: str,
        endpoint: str,
        input_file: str,
        window: str,
        seconds: int,
        metadata: dict[str, str] | None,
        output_lifetime: int | None = None,
        tenant: str = "",
    ) -> dict[str, Any]:
        """Add a batch, on which a server of `model` will work. Returns the batch as clients see it.

        Args:
            window: The time for the batch as clients write it; `seconds` is its meaning.
            output_lifetime: Seconds until the files that the batch makes are deleted; by default, and at most, the
                store's.
            tenant: Whose requests these are; see Add.

        Raises:
            UnknownIdError: There is no such file.
            RequestError: The file is not for batches.
        """
        now = int(self.clock.now())
        body = {
            "id": f"batch_{uuid.uuid4().hex}",
            "object": "batch",
            "endpoint": endpoint,
            "model": model,
            "errors": None,
            "input_file_id": input_file,
            "completion_window": window,
            "status": "validating",
            "output_file_id": None,
            "error_file_id": None,
            "created_at": now,
            "expires_at": now + seconds,
            **dict.fromkeys(
                ("in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at", "cancelling_at",
                 "cancelled_at")
            ),
            "metadata": metadata,
            "output_lifetime": output_lifetime,
            "tenant": tenant,
        }  # fmt: skip

        def insert(connection: sqlite3.Connection) -> dict[str, Any]:
            if (purpose := file_of(connection, input_file, "input_file_id").purpose) != "batch":
                raise RequestError(
                    f"The file's purpose is '{purpose}': upload it with purpose 'batch'.", param="input_file_id"
                )
            values = (body["id"], now, now + seconds, model, "validating", input_file, encode(body))
            connection.execute("INSERT INTO batches VALUES (?, ?, ?, ?, ?, ?, ?, NULL, 0)", values)
            return seen(connection, str(body["id"]))

        return await self.database.write(insert)

    async def get(self, asked: str) -> dict[str, Any]:
        """A batch as clients see it; raises UnknownIdError."""
        return await self.database.read(lambda connection: seen(connection, asked))

    async def page(self, after: str | None, limit: int) -> tuple[Sequence[dict[str, Any]], bool]:
        """Batches, the latest first, and whether there are more. Raises UnknownIdError if there is no batch `after`."""

        def find(connection: sqlite3.Connection) -> list[dict[str, Any]]:
            if after is not None:
                seen(connection, after)
            query = (
                "SELECT id FROM batches WHERE ?1 IS NULL OR rowid < (SELECT rowid FROM batches WHERE id = ?1) "
                "ORDER BY rowid DESC LIMIT ?2"
            )
            return [seen(connection, row[0]) for row in connection.execute(query, (after, limit + 1)).fetchall()]

        found = await self.database.read(find)
        return found[:limit], len(found) > limit

    async def cancel(self, asked: str) -> dict[str, Any]:
        """Ask for a batch to be cancelled. The process that works on it, or takes it over, cancels it. Raises
        UnknownIdError if there is no such batch, and RequestError if it has ended."""

        def change(connection: sqlite3.Connection) -> dict[str, Any]:
            body = seen(connection, asked)
            if body["status"] in ("validating", "in_progress"):
                set_fields(connection, asked, status="cancelling", cancelling_at=int(self.clock.now()))
            elif body["status"] not in ("cancelling", "cancelled"):
                raise RequestError(f"The batch is {body['status']} and cannot be cancelled any more.", param="batch_id")
            return seen(connection, asked)

        return await self.database.write(change)

    # --- for the process that works on a batch ----------------------------------------------------------------------

    async def claim(self, models: Sequence[str]) -> ClaimedBatch | None:
        """Take over the oldest open batch of these models on which nobody works. A process works on one batch at a
        time, so a batch that is its own already was left in the middle."""
        now = self.clock.now()
        marks = ", ".join("?" * len(models))

        def take(connection: sqlite3.Connection) -> ClaimedBatch | None:
            query = (
                f"SELECT id FROM batches WHERE status IN ({_OPEN}) AND model IN ({marks}) "
                f"AND (owner IS NULL OR owner = ? OR owner NOT IN ({ALIVE})) ORDER BY rowid LIMIT 1"
            )
            row = connection.execute(query, (*models, self.process.id, now)).fetchone()
            if row is None:
                return None
            self.process.say_alive(connection, now)
            connection.execute("UPDATE batches SET owner = ? WHERE id = ?", (self.process.id, row[0]))
            kept = body_of(connection, row[0])
            return ClaimedBatch(seen(connection, row[0]), kept.get("ends_as"), kept.get("tenant", ""))

        return await self.database.write(take)

    async def release(self, batch: str) -> None:
        """Give a batch back, so that another process can go on with it."""
        await self._owned(batch, lambda c: c.execute("UPDATE batches SET owner = NULL WHERE id = ?", (batch,)))

    async def begin(self, batch: str, total: int) -> None:
        """Note that the input is valid and has this many requests."""

        def change(connection: sqlite3.Connection) -> None:
            connection.execute("UPDATE batches SET total = ? WHERE id = ?", (total, batch))
            if seen(connection, batch)["status"] == "validating":
                set_fields(connection, batch, status="in_progress", in_progress_at=int(self.clock.now()))

        await self._owned(batch, change)

    async def fail(self, batch: str, errors: Sequence[dict[str, Any]]) -> None:
        """End a batch that could not be run to its end, with errors that have code, message, param and line."""
        found = {"object": "list", "data": list(errors)}
        await self._owned(batch, lambda connection: set_fields(connection, batch, errors=found))
        await self.finish(batch, "failed")

    async def lines_done(self, batch: str) -> set[int]:
        query = "SELECT line FROM batch_results WHERE batch = ?"
        return await self.database.read(lambda c: {row[0] for row in c.execute(query, (batch,))})

    async def record(self, batch: str, results: Sequence[BatchResult]) -> str:
        """Write down results. Returns the batch's status, which another process may have changed. The status is
        `cancelling` too if the batch no longer belongs to this process."""
        now = self.clock.now()

        def insert(connection: sqlite3.Connection) -> str:
            row = connection.execute("SELECT status, owner FROM batches WHERE id = ?", (batch,)).fetchone()
            if row is None or row[1] != self.process.id:
                return "cancelling"
            self.process.say_alive(connection, now)
            self.limits.make_room(connection, sum(len(result.data) + 128 for result in results))
            rows = [(batch, result.line, result.succeeded, result.data) for result in results]
            connection.executemany("INSERT OR IGNORE INTO batch_results VALUES (?, ?, ?, ?)", rows)
            return str(row[0])

        return await self.database.write(insert)

    async def finish(self, batch: str, status: str) -> None:
        """Make the output files from the results, in the order of the input, and end the batch as completed, cancelled,
        expired or failed. Results move step by step, so a process that takes over in between can go on."""

        def begin(connection: sqlite3.Connection) -> None:
            body, now = body_of(connection, batch), int(self.clock.now())
            changes: dict[str, Any] = {"status": "cancelling" if status == "cancelled" else "finalizing"}
            if body["finalizing_at"] is None and status not in ("cancelled", "failed"):
                changes["finalizing_at"] = now
            for name, succeeded, kind in _OUTPUTS:
                query = "SELECT 1 FROM batch_results WHERE batch = ? AND succeeded = ? LIMIT 1"
                if body[name] is None and connection.execute(query, (batch, succeeded)).fetchone():
                    filename = f"{batch}_{kind}.jsonl"
                    lifetime = body["output_lifetime"]
                    file = begin_file(
                        connection, self.limits, self.clock, filename, "batch_output", lifetime, batch=batch
                    )
                    changes[name] = file.id
            counts = seen(connection, batch)["request_counts"]
            set_fields(connection, batch, **changes, final_counts=counts, ends_as=status)

        def move(connection: sqlite3.Connection) -> bool:
            body = body_of(connection, batch)
            moved = [self._move_some(connection, batch, body[name], ok) for name, ok, _ in _OUTPUTS if body[name]]
            return any(moved)

        def end(connection: sqlite3.Connection) -> None:
            body = body_of(connection, batch)
            for name, _, _ in _OUTPUTS:
                if body[name] is not None:
                    complete(connection, body[name])
            set_fields(connection, batch, status=status, **{f"{status}_at": int(self.clock.now())})
            connection.execute("UPDATE batches SET owner = NULL WHERE id = ?", (batch,))

        await self._owned(batch, begin)
        while await self._owned(batch, move):
            pass
        await self._owned(batch, end)

    def _move_some(self, connection: sqlite3.Connection, batch: str, file: str, succeeded: int) -> bool:
        query = "SELECT line, data FROM batch_results WHERE batch = ? AND succeeded = ? ORDER BY line LIMIT ?"
        rows = connection.execute(query, (batch, succeeded, RESULTS_MOVED_AT_ONCE)).fetchall()
        if not rows:
            return False
        statement = "DELETE FROM batch_results WHERE batch = ? AND succeeded = ? AND line <= ?"
        connection.execute(statement, (batch, succeeded, rows[-1][0]))  # first: a full store has no room for both
        append(connection, self.limits, file, b"".join(data + b"\n" for _, data in rows))
        return True

    async def _owned(self, batch: str, work: Callable[[sqlite3.Connection], Any]) -> Any:
        """Run a transaction, and record that this process is alive. Nothing happens if the batch is not its own."""
        now = self.clock.now()

        def run(connection: sqlite3.Connection) -> Any:
            row = connection.execute("SELECT owner FROM batches WHERE id = ?", (batch,)).fetchone()
            if row is None or row[0] != self.process.id:
                return None
            self.process.say_alive(connection, now)
            return work(connection)

        return await self.database.write(run)
