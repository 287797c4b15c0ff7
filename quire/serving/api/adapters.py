"""The LoRA adapters that are served beside the base model: which there are by name, and loading others.

Engines read and check adapters; this process knows which contents a name means, and sends them with each request.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from quire.errors import RequestError, UnknownModelError
from quire.foundation.config.lora import LONGEST_NAME, LoraConfig
from quire.foundation.messages.from_engine import EngineId
from quire.foundation.messages.to_engine import Adapter
from quire.serving.api.peers import AdapterLoaded, AdapterUnloaded, Peers
from quire.serving.api.session.engines import Engines

_CONFIG = "adapter_config.json"


class ServedAdapters:
    """The adapters by name, kept equal in all API processes."""

    def __init__(self, lora: LoraConfig, engines: Engines, peers: Peers) -> None:
        self._lora = lora
        self._engines = engines
        self._peers = peers
        peers.on(AdapterLoaded, lambda news: self._serve(news.adapter))
        peers.on(AdapterUnloaded, lambda news: self._forget(news.name))
        self._by_name: dict[str, Adapter] = {}
        self._removed: set[str] = set()
        self._told: set[EngineId] = set()
        self._changing = asyncio.Lock()

    @property
    def all(self) -> Sequence[Adapter]:
        """All adapters, in the order in which they were loaded."""
        return list(self._by_name.values())

    def loaded(self, name: str) -> Adapter | None:
        return self._by_name.get(name)

    def serves(self, name: str) -> bool:
        """Whether a request may name this adapter: it is loaded, or lies in --lora-dir."""
        return name in self._by_name or self._in_directory(name) is not None

    async def find(self, name: str) -> Adapter | None:
        """The adapter of this name, loaded now if it lies in --lora-dir; None for none. Raises what `load` does."""
        if name not in self._by_name and (path := self._in_directory(name)) is not None:
            async with self._alone():
                if name not in self._by_name:
                    await self._load(name, str(path))
        return self._by_name.get(name)

    async def load(self, name: str, path: str, *, replace: bool) -> None:
        """Load an adapter under a name. Running requests keep the adapter that had the name before. Raises RequestError
        if the name is taken and `replace` is false, the path is out of bounds, or the engine refuses the adapter, and
        UnavailableError if no engine could load it."""
        if not 0 < len(name) <= LONGEST_NAME:
            raise RequestError(f"lora_name must have 1 to {LONGEST_NAME} characters.", param="lora_name")
        if self._lora.lora_dir and not Path(path).resolve().is_relative_to(Path(self._lora.lora_dir).resolve()):
            raise RequestError("lora_path must lie in --lora-dir on this server.", param="lora_path")
        async with self._alone():
            if name in self._by_name and not replace:
                raise RequestError(
                    f"The adapter '{name}' is loaded already: send load_inplace=true to replace it.", param="lora_name"
                )
            await self._load(name, path)

    async def unload(self, name: str) -> None:
        """Forget an adapter; running requests go on. Raises UnknownModelError if no adapter has this name."""
        async with self._alone():
            if name not in self._by_name:
                raise UnknownModelError(f"There is no adapter '{name}'.", param="lora_name")
            await self._engines.control("unload_adapter", {"name": name})
            self._forget(name)
            await self._peers.ask(AdapterUnloaded(name))

    def engine_ready(self) -> None:
        """Learn what engines that have become ready had loaded, and tell them what they lack."""
        for connection in (engine.connection for engine in self._engines):
            if connection.ready is None or connection.engine in self._told:
                continue
            self._told.add(connection.engine)
            known = {adapter.name: adapter for adapter in connection.ready.adapters}
            for name, adapter in known.items():
                if name in self._removed:
                    connection.tell("unload_adapter", {"name": name})
                    self._peers.tell(AdapterUnloaded(name))  # one may have started since it was removed
                else:
                    self._by_name.setdefault(name, adapter)
            for name, adapter in self._by_name.items():
                if known.get(name) != adapter:
                    connection.tell("load_adapter", {"name": name, "path": adapter.path})

    async def _load(self, name: str, path: str) -> None:
        done = await self._engines.control("load_adapter", {"name": name, "path": path})
        if done.error:
            raise RequestError(done.error, param="model" if self._in_directory(name) else "lora_path")
        adapter = Adapter(**done.value)
        self._serve(adapter)
        await self._peers.ask(AdapterLoaded(adapter))

    @contextlib.asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """A context in which no other task and no other process changes adapters, so all processes know the same."""
        async with self._changing, self._peers.exclusive():
            yield

    def _serve(self, adapter: Adapter) -> None:
        self._by_name[adapter.name] = adapter
        self._removed.discard(adapter.name)

    def _forget(self, name: str) -> None:
        self._by_name.pop(name, None)
        self._removed.add(name)

    def _in_directory(self, name: str) -> Path | None:
        """The path of this adapter in --lora-dir; None if there is none."""
        if not self._lora.lora_dir or "\0" in name or len(name) > LONGEST_NAME:
            return None
        if name == ".." or Path(name).name != name:  # outside, or another way to write a name
            return None
        path = Path(self._lora.lora_dir) / name
        return path if (path / _CONFIG).is_file() else None
