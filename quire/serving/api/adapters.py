"""The LoRA adapters that are served beside the base model, by name: which there are, and loading others.

Engines read and check them; here is known which contents a name means. Each request carries that, so an engine that
takes another's place serves it too.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import Protocol

from quire.errors import RequestError, UnknownModelError
from quire.foundation.config.lora import LONGEST_NAME, LoraConfig
from quire.foundation.messages.from_engine import Done, EngineId, Ready
from quire.foundation.messages.to_engine import Adapter
from quire.serving.api.peers import AdapterLoaded, AdapterUnloaded, Answer, Peers

_CONFIG = "adapter_config.json"


class Engines(Protocol):
    """The way to all engines."""

    async def control(self, action: str, value: dict[str, str]) -> Done:
        """Send all of them a command."""
        ...


class Connection(Protocol):
    """The way to one engine.

    Attributes:
        engine: Which.
        ready: What it said when it was; None before.
    """

    engine: EngineId
    ready: Ready | None

    def tell(self, action: str, value: dict[str, str]) -> None:
        """Send it a command whose answer nobody waits for."""
        ...


class ServedAdapters:
    """Adapters by name.

    Args:
        lora: Settings.
        engines: See Engines.
        peers: The other API processes, which serve the same ones.
    """

    def __init__(self, lora: LoraConfig, engines: Engines, peers: Peers) -> None:
        self._lora = lora
        self._engines = engines
        self._peers = peers
        peers.on(AdapterLoaded, self._loaded_by_peer)
        peers.on(AdapterUnloaded, self._unloaded_by_peer)
        self._by_name: dict[str, Adapter] = {}
        self._removed: set[str] = set()
        self._told: set[EngineId] = set()
        self._changing = asyncio.Lock()

    @property
    def all(self) -> Sequence[Adapter]:
        """In the order in which they were loaded."""
        return list(self._by_name.values())

    def loaded(self, name: str) -> Adapter | None:
        """The adapter of this name, if it is loaded."""
        return self._by_name.get(name)

    def serves(self, name: str) -> bool:
        """Whether a request may name it: it is loaded, or in --lora-dir."""
        return name in self._by_name or self._in_directory(name) is not None

    async def find(self, name: str) -> Adapter | None:
        """The adapter of this name, loaded if it is in --lora-dir.

        Raises:
            RequestError: It does not serve; the message names the tensor.
            UnavailableError: There is no engine that could load it.
        """
        if name not in self._by_name and (path := self._in_directory(name)) is not None:
            async with self._alone():
                if name not in self._by_name:
                    await self._load(name, str(path))
        return self._by_name.get(name)

    async def load(self, name: str, path: str, *, replace: bool) -> None:
        """Load an adapter under a name. Requests that run with another one of this name go on with that.

        Raises:
            RequestError: It does not serve, the name is taken and not to be replaced, or the path is out of bounds.
            UnavailableError: There is no engine that could load it.
        """
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
        """Forget a name. Requests that run go on.

        Raises:
            UnknownModelError: Nothing is loaded under it.
            UnavailableError: There is no engine.
        """
        async with self._alone():
            if name not in self._by_name:
                raise UnknownModelError(f"There is no adapter '{name}'.", param="lora_name")
            await self._engines.control("unload_adapter", {"name": name})
            self._forget(name)
            await self._peers.ask(AdapterUnloaded(name))

    def engine_ready(self, connections: Iterable[Connection]) -> None:
        """An engine takes work: it tells what was loaded before this process, and is told what it does not know."""
        for connection in connections:
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
        """Within it nobody else changes what is loaded, in no process: so all of them know the same."""
        async with self._changing, self._peers.exclusive():
            yield

    def _serve(self, adapter: Adapter) -> None:
        self._by_name[adapter.name] = adapter
        self._removed.discard(adapter.name)

    def _forget(self, name: str) -> None:
        self._by_name.pop(name, None)
        self._removed.add(name)

    def _loaded_by_peer(self, news: AdapterLoaded) -> Answer:
        self._serve(news.adapter)
        return {}

    def _unloaded_by_peer(self, news: AdapterUnloaded) -> Answer:
        self._forget(news.name)
        return {}

    def _in_directory(self, name: str) -> Path | None:
        """Where --lora-dir has an adapter of this name."""
        if not self._lora.lora_dir or "\0" in name or len(name) > LONGEST_NAME:
            return None
        if name == ".." or Path(name).name != name:  # outside, or another way to write a name
            return None
        path = Path(self._lora.lora_dir) / name
        return path if (path / _CONFIG).is_file() else None
