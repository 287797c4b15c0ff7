"""What tests put into a store and read back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from quire.serving.store.limits import StoreLimits
from quire.serving.store.responses import StoredResponse
from quire.serving.store.store import Store

LIMITS = StoreLimits(max_bytes=2**22, max_age=1000.0, max_file_bytes=2**20)


class Time:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.value = 1_000_000.0

    def now(self) -> float:
        return self.value


def run(*work: Coroutine[Any, Any, Any]) -> Any:
    """The results of coroutines, one after the other, in an event loop of their own; of the last one."""

    async def all_of_them() -> Any:
        return [await each for each in work][-1]

    return asyncio.run(all_of_them())


def response(name: str, size: int = 10, status: str = "completed", previous: str | None = None) -> StoredResponse:
    return StoredResponse(name, status, b"[]", b"x" * size, previous)


async def parts(*data: bytes) -> AsyncIterator[bytes]:
    for each in data:
        yield each


async def content(store: Store, file: str) -> bytes:
    return b"".join([part async for part in store.files.parts(file)])


async def ids(store: Store) -> list[str]:
    found, _ = await store.files.page(purpose=None, after=None, limit=100, order="asc")
    return [file.id for file in found]
