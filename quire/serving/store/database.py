"""One SQLite file behind one thread: its tables, opening, transactions, what to do with a broken file, and which
processes that share it are alive.

`VERSION` is written into the file (SQLite's `user_version`). A change of the tables adds a script to MIGRATIONS and
never edits one.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import sqlite3
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from quire.errors import ConfigError, UnavailableError, reason
from quire.serving.store.limits import PROCESS_DEAD_S, StoreFullError

MIGRATIONS = (
    """
    CREATE TABLE responses (
        id TEXT PRIMARY KEY,
        used REAL NOT NULL,      -- when it was made, or last continued
        status TEXT NOT NULL,
        previous TEXT,           -- the response that it continues
        input BLOB NOT NULL,     -- JSON: the items that came with this response, not those of earlier ones
        body BLOB NOT NULL,      -- JSON: the response as clients see it
        owner TEXT               -- the process that works on it in the background
    );
    CREATE INDEX responses_by_age ON responses (used);

    CREATE TABLE response_events (
        response TEXT NOT NULL REFERENCES responses ON DELETE CASCADE,
        number INTEGER NOT NULL, -- the event's sequence_number
        data BLOB NOT NULL,      -- JSON
        PRIMARY KEY (response, number)
    ) WITHOUT ROWID;

    CREATE TABLE files (
        id TEXT PRIMARY KEY,
        created INTEGER NOT NULL,
        expires INTEGER NOT NULL,
        filename TEXT NOT NULL,
        purpose TEXT NOT NULL,
        size INTEGER NOT NULL,
        complete INTEGER NOT NULL,
        batch TEXT               -- the batch that writes it, until it is complete
    );
    CREATE TABLE file_parts (
        file TEXT NOT NULL REFERENCES files ON DELETE CASCADE,
        number INTEGER NOT NULL,
        data BLOB NOT NULL,
        PRIMARY KEY (file, number)
    );

    CREATE TABLE batches (
        id TEXT PRIMARY KEY,
        created INTEGER NOT NULL,
        expires INTEGER NOT NULL,
        model TEXT NOT NULL,     -- servers of this model work on it
        status TEXT NOT NULL,
        input_file TEXT NOT NULL,
        body BLOB NOT NULL,      -- JSON: the batch as clients see it, without its counts
        owner TEXT,              -- the process that works on it
        total INTEGER NOT NULL DEFAULT 0
    );
    CREATE TABLE batch_results (
        batch TEXT NOT NULL REFERENCES batches ON DELETE CASCADE,
        line INTEGER NOT NULL,   -- of the input file
        succeeded INTEGER NOT NULL,
        data BLOB NOT NULL,      -- JSON: the line of the output file or of the error file
        PRIMARY KEY (batch, line)
    );
    CREATE INDEX batch_results_by_kind ON batch_results (batch, succeeded, line);

    CREATE TABLE processes (
        id TEXT PRIMARY KEY,
        seen REAL NOT NULL       -- when it last said that it is alive
    );
    """,
)
VERSION = len(MIGRATIONS)


logger = logging.getLogger(__name__)
T = TypeVar("T")

BUSY_S = 10.0
"""Seconds that a transaction waits for another process's."""
MARGIN_PAGES = 256
"""Pages that SQLite may take beyond the limit, so that rows can be deleted in a full store."""
ALIVE = f"SELECT id FROM processes WHERE seen > ? - {PROCESS_DEAD_S}"
"""Query for the ids of processes that are alive. Its argument is the present time."""


class Database:
    """A store's file of at most `max_bytes`, made when it is first used. It and its directory are for their owner
    only."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.path = path
        self.max_bytes = max_bytes
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._connection: sqlite3.Connection | None = None
        self._inode = 0

    async def write(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run a transaction that changes something, in the thread. Raises StoreFullError if there is no room, and
        UnavailableError if the file is locked for too long or cannot be read or written."""
        return await self._run(work, "BEGIN IMMEDIATE")

    async def read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run a transaction that changes nothing, in the thread; raises UnavailableError as `write` does."""
        return await self._run(work, "BEGIN")

    def open_now(self) -> None:
        """Open the file, to know at the start that it can be used. Raises ConfigError if it cannot be opened."""
        try:
            self._thread.submit(self._open).result()
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(
                f"The store {self.path} cannot be opened: {reason(error)}. Choose another with --responses-store-path."
            ) from error

    def close(self) -> None:
        """End the thread when its work is done, and close the file."""
        self._thread.submit(self._close)
        self._thread.shutdown(wait=True)

    async def _run(self, work: Callable[[sqlite3.Connection], T], begin: str) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._transaction, work, begin)

    # --- in the thread ----------------------------------------------------------------------------------------------

    def _transaction(self, work: Callable[[sqlite3.Connection], T], begin: str) -> T:
        try:
            try:
                return self._attempt(work, begin)
            except sqlite3.DatabaseError as error:
                if not _is_broken(error):
                    raise
                self._move_aside(error)
                return self._attempt(work, begin)
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode == sqlite3.SQLITE_FULL:
                raise StoreFullError.of(self.max_bytes) from error
            raise UnavailableError(f"The store cannot be used now: {reason(error)}. Try again.") from error
        except OSError as error:
            raise UnavailableError(f"The store cannot be used now: {reason(error)}. Try again.") from error

    def _attempt(self, work: Callable[[sqlite3.Connection], T], begin: str) -> T:
        connection = self._connection or self._open()
        connection.execute(begin)
        try:
            result = work(connection)
            connection.execute("COMMIT")
            return result
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise

    def _open(self) -> sqlite3.Connection:
        with self._alone():
            try:
                self._connection = self._connect()
            except sqlite3.DatabaseError as error:
                if not _is_broken(error):
                    raise
                self._rename(error)
                self._connection = self._connect()
        self._inode = self.path.stat().st_ino
        return self._connection

    def _connect(self) -> sqlite3.Connection:
        # Not opened if it is there: to close it would end the locks of this process's other connections (POSIX).
        with contextlib.suppress(FileExistsError):
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        with contextlib.suppress(PermissionError):
            self.path.chmod(0o600)  # SQLite gives its other files the same mode
        connection = sqlite3.connect(self.path, timeout=BUSY_S, isolation_level=None)
        try:
            for setting in ("auto_vacuum = INCREMENTAL", "journal_mode = WAL", "synchronous = NORMAL",
                            "foreign_keys = ON", "journal_size_limit = 16777216"):  # fmt: skip
                connection.execute(f"PRAGMA {setting}")
            _upgrade(connection, self.path)
            (page_size,) = connection.execute("PRAGMA page_size").fetchone()
            connection.execute(f"PRAGMA max_page_count = {self.max_bytes // page_size + MARGIN_PAGES}")
        except BaseException:
            connection.close()
            raise
        return connection

    def _move_aside(self, error: Exception) -> None:
        """Replace a broken file by a new one, unless another process has done so already."""
        self._close()
        with self._alone():
            if self.path.exists() and self.path.stat().st_ino == self._inode:
                self._rename(error)

    def _rename(self, error: Exception) -> None:
        aside = self.path.with_name(f"{self.path.name}.broken-{time.time_ns()}")
        for suffix in ("", "-wal", "-shm"):
            with contextlib.suppress(FileNotFoundError):
                os.rename(f"{self.path}{suffix}", f"{aside}{suffix}")
        logger.error(
            "The store of responses, files and batches is broken (%s). It was moved to %s; a new one begins empty.",
            reason(error),
            aside,
        )

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other processes from opening or moving the file within this context."""
        if not self.path.parent.exists():
            self.path.parent.mkdir(0o700, parents=True, exist_ok=True)
        lock = os.open(f"{self.path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _upgrade(connection: sqlite3.Connection, path: Path) -> None:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > VERSION:
        raise ConfigError(
            f"The store {path} was written by a newer version of Quire (format {version}, this one reads {VERSION}). "
            "Choose another with --responses-store-path."
        )
    for number in range(version, VERSION):
        connection.executescript(f"BEGIN IMMEDIATE; {MIGRATIONS[number]} PRAGMA user_version = {number + 1}; COMMIT;")


def _is_broken(error: sqlite3.DatabaseError) -> bool:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the low byte is the kind; what is above tells where
    return code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


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
