"""Whom a rank reaches of an engine whose ranks divide layers and are stages too."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quire.compute.collectives import card_stage_links, cards
from quire.compute.collectives.card_stage_links import CardStageLinks, StreamSize
from quire.compute.collectives.cuda_ipc import PeerMemoryError
from quire.compute.collectives.nccl import ID_BYTES
from quire.compute.mesh import Mesh
from quire.errors import ConfigError
from quire.runtime.executor.multi_rank_executor import exchanges_of

SIZE = StreamSize(tokens=8, hidden=16, dtype=torch.bfloat16, slots=5, steps=3)


class Offers:
    """An Exchange in which rank r offers r, over and over."""

    def __init__(self, ranks: int, failed: frozenset[int] = frozenset()) -> None:
        self._ranks, self._failed = ranks, failed
        self.rounds = 0

    def __call__(self, data: bytes) -> list[bytes]:
        self.rounds += 1
        offers = [bytes([1 + rank]) * max(1, len(data)) for rank in range(self._ranks)]
        return [bytes(len(offer)) if rank in self._failed else offer for rank, offer in enumerate(offers)]


@pytest.fixture
def mapped(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The ranks whose memory was mapped."""
    found: list[int] = []

    def map_memory(handle: bytes) -> Any:
        found.append(handle[-1] - 1)
        return SimpleNamespace(address=1 << 20)

    for module in (cards, card_stage_links):
        monkeypatch.setattr(module, "OwnMemory", lambda size: SimpleNamespace(address=1 << 10, handle=bytes(64)))
        monkeypatch.setattr(module, "MappedMemory", map_memory)
    return found


@pytest.mark.parametrize("rank", range(4))
def test_sums_are_over_a_stages_ranks(rank: int, mapped: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """One that failed in another stage has no part in them."""
    ids: list[bytes] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(cards, "new_id", lambda: bytes(ID_BYTES))
    monkeypatch.setattr(cards, "Nccl", lambda id, mesh, device: ids.append(id))
    mesh, offers = Mesh(rank, tp=2, pp=2), Offers(4, frozenset({3 - rank}))
    made = cards.Cards(mesh, torch.device("cpu"), offers)
    first = rank // 2 * 2
    assert mapped == [first + 1 - rank % 2]
    assert ids == [bytes([1 + first]) * ID_BYTES]
    assert made._memory is not None


@pytest.mark.parametrize(("rank", "next_"), [(0, 2), (1, 3), (2, 4), (3, 5), (4, 0), (5, 1)])
def test_a_rank_writes_to_its_place_in_the_next_stage(rank: int, next_: int, mapped: list[int]) -> None:
    mesh, offers = Mesh(rank, tp=2, pp=3), Offers(6)
    links = CardStageLinks(mesh, torch.device("cpu"), offers, SIZE)
    assert mapped == [next_]
    assert [end is None for end in links.ends] == [rank < 2, rank >= 4]
    assert offers.rounds == exchanges_of(Mesh(pp=3))
    assert exchanges_of(mesh) == 2 * offers.rounds


def test_cards_that_cannot_map_one_another_are_refused_by_all_ranks(mapped: list[int]) -> None:
    with pytest.raises(ConfigError, match=r"-size 2: the GPUs cannot map .* \(another rank failed\)"):
        CardStageLinks(Mesh(0, pp=2), torch.device("cpu"), Offers(2, frozenset({1})), SIZE)


def test_the_drivers_reason_is_said(mapped: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(handle: bytes) -> Any:
        raise PeerMemoryError("cuIpcOpenMemHandle_v2 says CUDA_ERROR_PEER_ACCESS_UNSUPPORTED")

    class Told(Offers):
        def __call__(self, data: bytes) -> list[bytes]:
            offers = super().__call__(data)
            return [data, *offers[1:]]

    monkeypatch.setattr(card_stage_links, "MappedMemory", refuse)
    with pytest.raises(ConfigError, match="PEER_ACCESS_UNSUPPORTED"):
        CardStageLinks(Mesh(0, pp=2), torch.device("cpu"), Told(2), SIZE)
