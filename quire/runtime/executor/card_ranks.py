"""How a rank with a card of its own reaches the others of its engine."""

from __future__ import annotations

from typing import NamedTuple

import torch

from quire.compute.collectives.card_stage_links import CardStageLinks, StreamSize
from quire.compute.collectives.cards import Cards, Exchange
from quire.compute.collectives.collectives import Collectives, OneRank
from quire.compute.collectives.delta import NO_LINKS, StageLinks
from quire.compute.mesh import Mesh
from quire.foundation.config import Config
from quire.models.spec import spec_of
from quire.planning.step_limits import StepLimits
from quire.runtime.worker.async_scheduling import max_in_flight
from quire.runtime.worker.graph_shapes import MAX_ROWS
from quire.runtime.worker.kv_tensors import DENSE
from quire.runtime.worker.stage_tokens import StageTokens


class CardRanks(NamedTuple):
    """How a rank reaches the other ranks of its engine: arguments of Worker, by their names."""

    collectives: Collectives
    rehearsed: Collectives
    links: StageLinks
    stages: StageTokens | None


def reach_ranks(config: Config, mesh: Mesh, device: torch.device, exchange: Exchange) -> CardRanks:
    """Find out how a rank reaches the ranks that divide its layers, and the ranks that have other layers. `exchange` is
    called as often as `exchanges_of` says.

    Raises:
        ConfigError: The rank cannot reach them.
    """
    collectives: Collectives = OneRank()
    rehearsed: Collectives = OneRank()
    if mesh.tp > 1:
        cards = Cards(mesh, device, exchange)
        collectives, rehearsed = cards, cards.rehearsed()
    if mesh.pp == 1:
        return CardRanks(collectives, rehearsed, NO_LINKS, None)
    links = CardStageLinks(mesh, device, exchange, stream_size(config, mesh))
    return CardRanks(collectives, rehearsed, links.ends, StageTokens(links, mesh))


def stream_size(config: Config, mesh: Mesh) -> StreamSize:
    """The largest stream of these settings; graphs may pad a step to more rows than the engine has."""
    limits, hidden = StepLimits.of(config), spec_of(config.model).hidden
    tokens = max(limits.tokens, limits.rows, MAX_ROWS)
    return StreamSize(tokens, hidden, DENSE[config.model.dtype], limits.rows + 1, max_in_flight(mesh.pp))
