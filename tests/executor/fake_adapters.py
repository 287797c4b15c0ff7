"""What stands for adapters where there is no model: names of what each slot holds, for the fake executor."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

from quire.foundation.messages.to_engine import Adapter
from quire.foundation.messages.workers import AdapterLoaded, LoadAdapter, Order, OrderDone


class FakeAdapters:
    """The Orders of the fake executor: it keeps the digest of what each slot holds, and reads no files.

    Args:
        digests: Of the files, by path; a path that is not there cannot be read.
        delay: Says for each load how often `done` is asked before it is there; default: once.
    """

    def __init__(self, digests: Mapping[str, str], delay: Callable[[], int] = lambda: 1) -> None:
        self._digests = digests
        self._delay = delay
        self._loading: deque[tuple[Adapter, int, int]] = deque()
        self._left = 0
        self.slots: dict[int, str] = {}
        self.in_flight: Callable[[int], bool] = lambda slot: False

    def post(self, order: Order) -> None:
        assert isinstance(order, LoadAdapter), order
        adapter, slot = order.adapter, order.slot
        assert not self.in_flight(slot), "a slot is written that a step in flight reads"
        self.slots.pop(slot, None)
        self._loading.append((adapter, slot, self._delay()))

    def done(self) -> list[OrderDone]:
        done: list[OrderDone] = []
        while self._loading:
            adapter, slot, polls = self._loading[0]
            self._left += 1
            if self._left < polls:
                break
            self._left = 0
            self._loading.popleft()
            done.append(self._load(adapter, slot))
        return done

    def _load(self, adapter: Adapter, slot: int) -> AdapterLoaded:
        digest = self._digests.get(adapter.path)
        if digest is None:
            return AdapterLoaded(adapter, slot, f"{adapter.path} cannot be read.")
        if adapter.digest and adapter.digest != digest:
            return AdapterLoaded(adapter, slot, f"{adapter.path} has changed.")
        if slot:
            self.slots[slot] = digest
        return AdapterLoaded(Adapter(adapter.name, adapter.path, digest), slot)
