"""Which adapter is in which slot of the device, and which requests wait for one.

A slot belongs to its adapter's requests until the last of them is over; then it keeps what it has until another adapter
needs it, which takes the one that was not used for the longest time. It is written only when no step in flight reads
it. Knows nothing about tensors and files.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.foundation.messages.to_engine import Adapter, Add
from quire.foundation.messages.workers import AdapterLoaded, LoadAdapter
from quire.runtime.executor.executor import Orders
from quire.scheduling.scheduler.request import Request
from quire.scheduling.scheduler.scheduler import Scheduler

ADAPTER = "adapter"
"""What a request awaits until its adapter is on the device."""
MAX_PASSES = 32
"""So many requests whose adapters are loaded may pass one that waits for a slot; then they wait as well."""


@dataclass
class _Slot:
    """A place on the device.

    Attributes:
        number: From 1.
        adapter: The adapter that it has, or that is loaded into it unless it is `ready`.
        users: Requests that use it and are not over, with the names that they call the adapter by.
        used: When it lost its last user, in turns of a counter.
        last_step: The newest plan by then: steps up to it may read the slot.
        pinned: Whether its adapter stays.
    """

    number: int
    adapter: Adapter | None = None
    ready: bool = False
    users: dict[int, str] = field(default_factory=dict)
    used: int = 0
    last_step: int = 0
    pinned: bool = False


class AdapterSlots:
    """Gives slots, which `orders` fill, to requests in the order in which they came."""

    def __init__(self, scheduler: Scheduler, orders: Orders, number: int) -> None:
        self._scheduler = scheduler
        self._orders = orders
        self._slots = [_Slot(each) for each in range(1, number + 1)]
        self._by_digest: dict[str, _Slot] = {}
        self._waiting: dict[int, Adapter] = {}  # in order of arrival
        self._passes = 0
        self._turn = 0
        self._may_grant = False
        scheduler.resources.append(self)

    def pin(self, adapter: Adapter) -> None:
        """Load an adapter now, and keep it for good. At least one slot must not be pinned."""
        slot = self._slot_for(adapter)
        assert slot is not None, "as many slots are pinned as there are"
        slot.pinned = True

    def prepare(self, message: Add) -> tuple[str, ...]:
        """Queue a new sequence for its adapter. Returns what it has to wait for, see `Request.awaits`: at least for the
        next `update`."""
        if message.adapter is None:
            return ()
        self._waiting[message.id] = message.adapter
        self._may_grant = True
        return (ADAPTER,)

    def update(self, loaded: list[AdapterLoaded]) -> list[Request]:
        """Give slots to waiting requests, as far as any are free; called once a turn with the adapters that were
        loaded into slots, or refused. Returns requests that have failed because their adapters cannot be loaded."""
        failed = [request for each in loaded for request in self._take_in(each)]
        if self._waiting and self._may_grant:
            failed += self._refuse_if_all_pinned()
            self._grant()
        return failed

    def release(self, request: Request) -> None:
        """Take back the slot of a request that is over. One that was preempted keeps its slot."""
        if request.ended is None:
            return
        self._waiting.pop(request.id, None)
        if request.adapter_slot:
            slot = self._slots[request.adapter_slot - 1]
            del slot.users[request.id]
            self._turn += 1
            slot.used, slot.last_step = self._turn, self._scheduler.last_step
        self._may_grant = True

    @property
    def running(self) -> list[str]:
        """Names of the adapters that requests use. One adapter may have several names."""
        return sorted(set[str]().union(*(slot.users.values() for slot in self._slots)))

    @property
    def waiting(self) -> list[str]:
        """Names of the adapters that requests wait to get a slot for."""
        return sorted({adapter.name for adapter in self._waiting.values()})

    @property
    def num_free(self) -> int:
        """Slots that no request uses, for leak tests."""
        return sum(not slot.users for slot in self._slots)

    def _take_in(self, loaded: AdapterLoaded) -> list[Request]:
        """Record that a slot was filled. If it could not be, the requests that it was for fail, and are returned."""
        slot = self._slots[loaded.slot - 1]
        assert slot.adapter is not None and slot.adapter.digest == loaded.adapter.digest, "not what was asked for"
        self._may_grant = True
        if not loaded.error:
            slot.ready = True
            for request_id in sorted(slot.users):
                self._scheduler.arrived(request_id, ADAPTER)
            return []
        del self._by_digest[slot.adapter.digest]
        slot.adapter, slot.pinned = None, False
        failed = [self._scheduler.end(request_id, "error", loaded.error) for request_id in sorted(slot.users)]
        return [request for request in failed if request is not None]

    def _refuse_if_all_pinned(self) -> list[Request]:
        """Fail the requests that would wait for ever because all slots are pinned, and return them."""
        if not all(slot.pinned for slot in self._slots):
            return []
        why = "Every slot for adapters is taken by one of --lora-pinned: raise --max-loras."
        never = [number for number, each in self._waiting.items() if each.digest not in self._by_digest]
        return [request for number in never if (request := self._scheduler.end(number, "error", why)) is not None]

    def _grant(self) -> None:
        """Give slots to waiting requests in order. Those behind one that finds no slot may pass it for a while."""
        blocked = self._may_grant = False
        for request_id, adapter in list(self._waiting.items()):
            if blocked and self._passes >= MAX_PASSES:
                break
            slot = self._by_digest.get(adapter.digest) if blocked else self._slot_for(adapter)
            if slot is None:
                blocked = True
                continue
            self._passes = self._passes + 1 if blocked else 0
            del self._waiting[request_id]
            request = self._scheduler.get(request_id)
            assert request is not None, "a request that is over does not wait"
            request.adapter_slot = slot.number
            slot.users[request_id] = adapter.name
            if slot.ready:
                self._scheduler.arrived(request_id, ADAPTER)
        # A slot that steps in flight still read is free soon, and nobody says so.
        self._may_grant = blocked and any(not slot.users and not slot.pinned for slot in self._slots)

    def _slot_for(self, adapter: Adapter) -> _Slot | None:
        """The slot that has the adapter, or one into which it is loaded now; None if none is free."""
        slot = self._by_digest.get(adapter.digest)
        if slot is not None:
            return slot
        finished = self._scheduler.finished_step
        free = [each for each in self._slots if self._is_free(each) and each.last_step <= finished]
        if not free:
            return None
        slot = min(free, key=lambda each: (each.adapter is not None, each.used))
        if slot.adapter is not None:
            del self._by_digest[slot.adapter.digest]
        slot.adapter, slot.ready = adapter, False
        self._by_digest[adapter.digest] = slot
        self._orders.post(LoadAdapter(adapter, slot.number))
        return slot

    def _is_free(self, slot: _Slot) -> bool:
        """Whether a slot may get another adapter. One that is being filled may not."""
        return not slot.users and not slot.pinned and (slot.adapter is None or slot.ready)
