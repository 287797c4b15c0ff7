"""Which links lead from one node to another."""

from __future__ import annotations

from quire.compute.mesh import Mesh
from quire.foundation.processes.launch import SocketEnd
from quire.runtime.executor.rank_links import Crossings, Link, crossing_links, node_of, ranks_of


def test_streams_cross_where_a_node_ends_and_tokens_go_back_to_the_first() -> None:
    mesh = Mesh(tp=2, pp=4)
    assert [list(ranks_of(node, mesh, 2)) for node in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert crossing_links(mesh, 2) == [
        Link("stream", 2, 4),
        Link("stream", 3, 5),
        Link("tokens", 6, 0),
        Link("tokens", 6, 1),
    ]
    assert crossing_links(mesh, 1) == []


def test_every_link_connects_two_nodes() -> None:
    mesh = Mesh(tp=1, pp=6)
    pairs = [(node_of(link.sender, mesh, 3), node_of(link.receiver, mesh, 3)) for link in crossing_links(mesh, 3)]
    assert pairs == [(0, 1), (1, 2), (2, 0)]


def test_ranks_get_the_ends_of_their_own_links() -> None:
    last = Crossings(range(4, 8), 2, {link: fd for fd, link in enumerate(crossing_links(Mesh(tp=2, pp=4), 2))}, 100, 10)
    ranks = {rank: Mesh(rank, 2, 4) for rank in range(8)}
    assert last.before(ranks[4]) == SocketEnd([0], 100)
    assert last.before(ranks[5]) == SocketEnd([1], 100)
    assert last.before(ranks[6]) is None
    assert last.tokens_out(ranks[6]) == SocketEnd([2, 3], 10)
    assert last.tokens_out(ranks[7]) is None
