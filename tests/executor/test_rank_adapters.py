"""One answer for all ranks: an adapter is there once it is in each of them, and of the same contents."""

from __future__ import annotations

from quire.foundation.messages.to_engine import Adapter
from quire.foundation.messages.workers import AdapterLoaded
from quire.runtime.executor.rank_answers import RankAdapters
from quire.runtime.executor.rank_messages import LoadAdapter

POET, LAWYER = Adapter("poet", "/poet", ""), Adapter("lawyer", "/lawyer", "")


class Two:
    """Two ranks that answer when a test says so."""

    def __init__(self) -> None:
        self.told: list[LoadAdapter] = []
        self.heard = 0
        self.adapters = RankAdapters(2, self.told.append, self._listen, "rank {}".format)

    def _listen(self) -> None:
        self.heard += 1

    def answer(self, rank: int, adapter: Adapter, digest: str = "d", slot: int = 0, error: str = "") -> None:
        read = Adapter(adapter.name, adapter.path, adapter.digest if error else digest)
        self.adapters.take(rank, AdapterLoaded(read, slot, error))


def test_an_adapter_is_there_when_it_is_in_all_ranks() -> None:
    two = Two()
    assert (two.adapters.loaded(), two.heard) == ([], 0)
    two.adapters.load(POET, 0)
    two.adapters.load(LAWYER, 3)
    assert two.told == [LoadAdapter(POET, 0), LoadAdapter(LAWYER, 3)]
    two.answer(1, POET)
    two.answer(1, LAWYER, slot=3)
    assert (two.adapters.loaded(), two.heard) == ([], 1)
    two.answer(0, POET)
    assert two.adapters.loaded() == [AdapterLoaded(Adapter("poet", "/poet", "d"), 0)]
    two.answer(0, LAWYER, slot=3)
    assert two.adapters.loaded() == [AdapterLoaded(Adapter("lawyer", "/lawyer", "d"), 3)]
    assert (two.adapters.loaded(), two.heard) == ([], 3)


def test_what_one_rank_refuses_is_refused_and_the_rank_is_named() -> None:
    two = Two()
    for _ in range(2):
        two.adapters.load(POET, 0)
    two.answer(0, POET)
    two.answer(1, POET, error="is broken")
    for rank in range(2):
        two.answer(rank, POET, error="is broken")
    assert [each.error for each in two.adapters.loaded()] == ["rank 1: is broken", "is broken"]


def test_files_that_ranks_have_read_differently_are_refused() -> None:
    two = Two()
    two.adapters.load(POET, 0)
    two.answer(0, POET, "before")
    two.answer(1, POET, "after")
    (loaded,) = two.adapters.loaded()
    assert "adapter 'poet' in /poet differ from rank to rank" in loaded.error
