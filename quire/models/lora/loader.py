"""Brings adapters to the device in threads of its own, so that no step waits for reading.

Keeps the last used ones in host memory. Knows nothing about which requests want them.
"""

from __future__ import annotations

import queue
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

import torch

from quire.errors import CheckpointError, QuireError
from quire.foundation.messages.to_engine import Adapter
from quire.foundation.messages.workers import AdapterLoaded, LoadAdapter
from quire.models.lora.updates import AdapterMemory, HostAdapter

Read = Callable[[str], HostAdapter]
"""Reads the files of an adapter's path."""
_READ_AT_ONCE = 4
"""The most adapters that are read at the same time: reading and hashing one keeps a core busy."""


class _Wanted(NamedTuple):
    """An adapter to load, the slot it goes to, and its files being read; `reading` is None if it is in host memory."""

    adapter: Adapter
    slot: int
    reading: Future[HostAdapter] | None


class DeviceAdapterLoader:
    """Reads adapters and copies them to slots of the device, in threads of its own.

    Args:
        kept: Maximum number of adapters kept in host memory.
        report: Called for each adapter that was loaded or refused, in the thread that loads.
    """

    def __init__(self, read: Read, memory: AdapterMemory, kept: int, report: Callable[[AdapterLoaded], None]) -> None:
        self._read = read
        self._memory = memory
        self._kept = kept
        self._host: OrderedDict[str, HostAdapter] = OrderedDict()  # by digest; the first was not used for the longest
        self._wanted: queue.SimpleQueue[LoadAdapter | None] = queue.SimpleQueue()
        self._report = report
        self._thread = threading.Thread(target=self._run, name="adapters", daemon=True)
        self._thread.start()

    def load(self, order: LoadAdapter) -> None:
        """Begin to load an adapter, behind all those that were asked for before."""
        self._wanted.put(order)

    def close(self) -> None:
        """Finish loading what was asked for, and end the thread."""
        self._wanted.put(None)
        self._thread.join()

    def _run(self) -> None:
        """Load adapters in the order in which they were asked for, and read some of them ahead of their turn."""
        ahead: deque[_Wanted] = deque()
        with torch.inference_mode():
            while True:
                while len(ahead) < _READ_AT_ONCE and not (ahead and self._wanted.empty()):
                    if (wanted := self._wanted.get()) is None:
                        for each in ahead:
                            self._finish(each)
                        return
                    ahead.append(self._begin(wanted.adapter, wanted.slot, {each.adapter.digest for each in ahead}))
                self._finish(ahead.popleft())

    def _begin(self, adapter: Adapter, slot: int, others: set[str]) -> _Wanted:
        """Begin to read an adapter, unless it is in host memory or among `others`, which are loaded before it."""
        known = adapter.digest and (adapter.digest in self._host or adapter.digest in others)
        return _Wanted(adapter, slot, None if known else self._read_beside(adapter.path))

    def _finish(self, wanted: _Wanted) -> None:
        adapter = wanted.adapter
        try:
            digest, error = self._load(wanted), ""
        except QuireError as refused:
            digest, error = adapter.digest, refused.message
        except Exception as failure:  # of memory, say: the engine goes on without this adapter
            digest, error = adapter.digest, f"{type(failure).__name__}: {failure}"
        self._report(AdapterLoaded(Adapter(adapter.name, adapter.path, digest), wanted.slot, error))

    def _load(self, wanted: _Wanted) -> str:
        adapter, slot = wanted.adapter, wanted.slot
        host = self._host.get(adapter.digest)
        if host is None:
            host = (wanted.reading or self._read_beside(adapter.path)).result()
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

    def _read_beside(self, path: str) -> Future[HostAdapter]:
        """Read an adapter's files in a daemon thread, which does not keep the process from ending."""
        reading: Future[HostAdapter] = Future()

        def read() -> None:
            try:
                with torch.inference_mode():
                    adapter = self._read(path)
            except BaseException as error:
                reading.set_exception(error)
            else:
                reading.set_result(adapter)

        try:
            threading.Thread(target=read, name="adapter", daemon=True).start()
        except RuntimeError as error:  # there are as many as the system allows
            reading.set_exception(error)
        return reading
