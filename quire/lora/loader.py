"""Brings adapters to the device in a thread of its own, so that no step waits for reading.

Keeps the last used ones in host memory. Knows nothing about which requests want them.
"""

from __future__ import annotations

import queue
import threading
from collections import OrderedDict
from collections.abc import Callable

import torch

from quire.errors import CheckpointError, QuireError
from quire.lora.updates import AdapterMemory, HostAdapter
from quire.messages.to_engine import Adapter
from quire.messages.workers import AdapterLoaded

Read = Callable[[str], HostAdapter]
"""Reads the files of an adapter's path."""


class AdapterLoader:
    """See `quire.executor.executor.AdapterLoader`.

    Args:
        read: Reads adapters.
        memory: The slots of the device.
        kept: Most adapters in host memory.
    """

    def __init__(self, read: Read, memory: AdapterMemory, kept: int) -> None:
        self._read = read
        self._memory = memory
        self._kept = kept
        self._host: OrderedDict[str, HostAdapter] = OrderedDict()  # by digest; the first was not used for the longest
        self._wanted: queue.SimpleQueue[tuple[Adapter, int] | None] = queue.SimpleQueue()
        self._loaded: queue.SimpleQueue[AdapterLoaded] = queue.SimpleQueue()
        self._report: Callable[[AdapterLoaded], None] = self._loaded.put
        self._thread = threading.Thread(target=self._run, name="adapters", daemon=True)
        self._thread.start()

    def load(self, adapter: Adapter, slot: int) -> None:
        self._wanted.put((adapter, slot))

    def loaded(self) -> list[AdapterLoaded]:
        done: list[AdapterLoaded] = []
        while not self._loaded.empty():
            done.append(self._loaded.get())
        return done

    def report_to(self, report: Callable[[AdapterLoaded], None]) -> None:
        """Say what has come, or was refused, by this in place of `loaded`, in the thread that loads. Called before
        anything is loaded."""
        self._report = report

    def close(self) -> None:
        """Nothing is loaded any more."""
        self._wanted.put(None)
        self._thread.join()

    def _run(self) -> None:
        with torch.inference_mode():
            while (wanted := self._wanted.get()) is not None:
                adapter, slot = wanted
                try:
                    digest, error = self._load(adapter, slot), ""
                except QuireError as refused:
                    digest, error = adapter.digest, refused.message
                except Exception as failure:  # of memory, say: the engine goes on without this adapter
                    digest, error = adapter.digest, f"{type(failure).__name__}: {failure}"
                self._report(AdapterLoaded(Adapter(adapter.name, adapter.path, digest), slot, error))

    def _load(self, adapter: Adapter, slot: int) -> str:
        """The digest of what was loaded."""
        host = self._host.get(adapter.digest)
        if host is None:
            host = self._read(adapter.path)
            if adapter.digest and host.digest != adapter.digest:
                raise CheckpointError(
                    f"The files of adapter '{adapter.name}' in {adapter.path} have changed since it was loaded: load "
                    "it again."
                )
        self._host[host.digest] = host
        self._host.move_to_end(host.digest)
        while len(self._host) > self._kept:
            self._host.popitem(last=False)
        if slot:
            self._memory.write(slot, host)
        return host.digest
