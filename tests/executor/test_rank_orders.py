"""One answer for all ranks: an order is done once each of them has done it, an adapter with the same contents."""

from __future__ import annotations

from quire.foundation.messages.to_engine import Adapter
from quire.foundation.messages.workers import AdapterLoaded, LoadAdapter, Order, Profile, Profiled
from quire.runtime.executor.rank_answers import RankOrders

POET, LAWYER = Adapter("poet", "/poet", ""), Adapter("lawyer", "/lawyer", "")


class Two:
    """Two ranks that answer when a test says so."""

    def __init__(self) -> None:
        self.told: list[Order] = []
        self.heard = 0
        self.orders = RankOrders(2, self.told.append, self._listen, "rank {}".format)

    def _listen(self) -> None:
        self.heard += 1

    def answer(self, rank: int, adapter: Adapter, digest: str = "d", slot: int = 0, error: str = "") -> None:
        read = Adapter(adapter.name, adapter.path, adapter.digest if error else digest)
        self.orders.take(rank, AdapterLoaded(read, slot, error))


def test_an_adapter_is_there_when_it_is_in_all_ranks() -> None:
    two = Two()
    assert (two.orders.done(), two.heard) == ([], 0)
    two.orders.post(LoadAdapter(POET, 0))
    two.orders.post(LoadAdapter(LAWYER, 3))
    assert two.told == [LoadAdapter(POET, 0), LoadAdapter(LAWYER, 3)]
    two.answer(1, POET)
    two.answer(1, LAWYER, slot=3)
    assert (two.orders.done(), two.heard) == ([], 1)
    two.answer(0, POET)
    assert two.orders.done() == [AdapterLoaded(Adapter("poet", "/poet", "d"), 0)]
    two.answer(0, LAWYER, slot=3)
    assert two.orders.done() == [AdapterLoaded(Adapter("lawyer", "/lawyer", "d"), 3)]
    assert (two.orders.done(), two.heard) == ([], 3)


def test_what_one_rank_refuses_is_refused_and_the_rank_is_named() -> None:
    two = Two()
    for _ in range(2):
        two.orders.post(LoadAdapter(POET, 0))
    two.answer(0, POET)
    two.answer(1, POET, error="is broken")
    for rank in range(2):
        two.answer(rank, POET, error="is broken")
    assert [each.error for each in two.orders.done() if isinstance(each, AdapterLoaded)] == [
        "rank 1: is broken",
        "is broken",
    ]


def test_files_that_ranks_have_read_differently_are_refused() -> None:
    two = Two()
    two.orders.post(LoadAdapter(POET, 0))
    two.answer(0, POET, "before")
    two.answer(1, POET, "after")
    (loaded,) = two.orders.done()
    assert isinstance(loaded, AdapterLoaded)
    assert "adapter 'poet' in /poet differ from rank to rank" in loaded.error


def test_kinds_of_orders_do_not_wait_for_one_another() -> None:
    two = Two()
    two.orders.post(LoadAdapter(POET, 1))
    two.orders.post(Profile(begins=False))
    two.answer(0, POET, slot=1)
    for rank, kernels in ((1, {"gemm": (2.0, 3)}), (0, {"norm": (1.0, 1)})):
        two.orders.take(rank, Profiled([kernels]))
    assert two.orders.done() == [Profiled([{"norm": (1.0, 1)}, {"gemm": (2.0, 3)}])]
    two.answer(1, POET, slot=1)
    assert two.orders.done() == [AdapterLoaded(Adapter("poet", "/poet", "d"), 1)]
