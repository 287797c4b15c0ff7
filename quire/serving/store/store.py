"""The store as API processes use it: responses, files and batches over one file."""

from __future__ import annotations

from pathlib import Path

from quire.foundation.clock import Clock, WallClock
from quire.foundation.config import ServerConfig
from quire.serving.store.batches import BatchStore
from quire.serving.store.database import Database, ProcessRecord
from quire.serving.store.files import FileStore
from quire.serving.store.limits import StoreLimits
from quire.serving.store.responses import ResponseStore


def open_store(server: ServerConfig, default: Path) -> Store | None:
    """The store that a server is configured with; None if it has none. `default` is the file if the settings name none.
    Raises ConfigError if the file cannot be used, and the settings name it or it exists already."""
    if server.disable_responses_store:
        return None
    limits = StoreLimits(
        server.responses_store_max_bytes, server.responses_store_max_age, server.responses_store_max_file_bytes
    )
    path = server.responses_store_path
    store = Store(Path(path).expanduser() if path else default, limits)
    if path or store.exists:
        store.open_now()
    return store


class Store:
    """Responses, files and batches in the file at `path`. `process` is this process, as the owner of its work."""

    def __init__(self, path: Path, limits: StoreLimits, clock: Clock | None = None) -> None:
        self.limits = limits
        self._clock = clock or WallClock()
        self._database = Database(path, limits.max_bytes)
        self.process = ProcessRecord(self._database)
        self.responses = ResponseStore(self._database, limits, self.process, self._clock)
        self.files = FileStore(self._database, limits, self._clock)
        self.batches = BatchStore(self._database, limits, self.process, self._clock)

    @property
    def exists(self) -> bool:
        return self._database.path.exists()

    def open_now(self) -> None:
        """Open the file, to know at the start that it can be used; raises ConfigError."""
        self._database.open_now()

    async def sweep(self) -> None:
        now = self._clock.now()
        await self._database.write(lambda connection: self.limits.sweep(connection, now))

    def close(self) -> None:
        self._database.close()
