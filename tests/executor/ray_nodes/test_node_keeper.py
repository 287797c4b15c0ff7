"""Nodes are started, heard and started again, in a cluster that is none."""

from __future__ import annotations

from collections import deque

import pytest

from quire.errors import EngineDeadError, ModelNotFoundError, SetupError
from quire.runtime.executor.ray_nodes.node_actor import News
from quire.runtime.executor.ray_nodes.node_keeper import MAX_FIRST_STARTS, ClusterNode, Lost, NodeKeeper, Placement

THREE = Placement(3, 1, "--nnodes 3")
READY = News("host", [], is_ready=True)


class FakeCluster:
    """Says what a test wants said. Its clock moves while nothing is.

    Attributes:
        started: Numbers of nodes, in the order in which they were started.
        said: What comes next, a look each.
    """

    def __init__(self) -> None:
        self.started: list[int] = []
        self.said: deque[list[tuple[int, News | Lost]]] = deque()
        self.time = 100.0

    def now(self) -> float:
        return self.time

    def machines(self) -> list[ClusterNode]:
        return [ClusterNode("a", "10.0.0.1", 1.0), ClusterNode("b", "10.0.0.2", 1.0)]

    def start(self, node: int) -> None:
        self.started.append(node)

    def news(self, wait_s: float) -> list[tuple[int, News | Lost]]:
        self.time += wait_s
        return self.said.popleft() if self.said else []


class Kept:
    """A keeper of nodes in a fake cluster, and what it says."""

    def __init__(self) -> None:
        self.cluster = FakeCluster()
        self.lines: list[tuple[int, str]] = []
        self.keeper = NodeKeeper(self.cluster, THREE, self.cluster, lambda node, line: self.lines.append((node, line)))

    def look(self, *said: tuple[int, News | Lost], wait_s: float = 1.0) -> None:
        self.cluster.said.append(list(said))
        self.keeper.look(wait_s)


@pytest.fixture
def kept() -> Kept:
    return Kept()


def test_all_are_started_and_print_what_they_say(kept: Kept) -> None:
    kept.cluster.said += [[(1, News("one", ["Quire"]))], [(2, READY)], [(1, READY)]]
    kept.keeper.start_all(10)
    assert kept.cluster.started == [1, 2]
    assert kept.lines == [(1, "Quire")]


def test_a_node_that_is_wrong_ends_the_start_with_its_error(kept: Kept) -> None:
    kept.cluster.said.append([(2, News("two", [], exit_code=3, cause="No such model", error="ModelNotFoundError"))])
    with pytest.raises(ModelNotFoundError, match=r"Node 2 of 3 \(two\): No such model\.$"):
        kept.keeper.start_all(10)


def test_a_node_that_dies_in_its_start_is_started_again_a_few_times(kept: Kept) -> None:
    kept.cluster.said += [[(1, Lost("no quire there"))], *[[]] * 5] * MAX_FIRST_STARTS
    with pytest.raises(SetupError, match=rf"Node 1 of 3 was lost: no quire there\. It was started {MAX_FIRST_STARTS}"):
        kept.keeper.start_all(100)
    assert kept.cluster.started.count(1) == MAX_FIRST_STARTS


def test_who_has_no_place_is_named_with_what_is_missing(kept: Kept) -> None:
    kept.cluster.said.append([(1, READY)])
    with pytest.raises(EngineDeadError, match=r"Node 2 of 3 did not start within 20 s.*has 2 nodes with 1 CPU or more"):
        kept.keeper.start_all(20)
    ((number, line),) = kept.lines
    assert number == 0
    assert line.startswith("Node 2 has no place yet: Ray's cluster has 2 nodes with 1 CPU or more")


def test_a_lost_node_is_started_again_and_said_to_be_there(kept: Kept) -> None:
    kept.look((1, READY), (2, READY))
    kept.look((2, Lost("its machine died")))
    for _ in range(8):
        kept.look()
    assert kept.cluster.started == [1, 2, 2]
    kept.look((2, News("spare", [])))
    assert [line for _, line in kept.lines] == [
        "Node 2 of 3 was lost: its machine died; Ray gives it another place",
        "Node 2 has no place yet: Ray's cluster has 2 nodes with 1 CPU or more (10.0.0.1, 10.0.0.2), and 3 are needed: "
        "--nnodes 3",
        "Node 2 has a place on spare",
    ]


def test_a_node_that_ends_again_and_again_is_started_more_and_more_rarely(kept: Kept) -> None:
    kept.look((1, READY), (2, READY))
    ends = 0
    while kept.cluster.time < 200:
        if kept.cluster.started.count(1) > ends:
            ends += 1
            kept.look((1, News("one", [], is_ready=True, exit_code=70, cause="the head is gone")))
        kept.look()
    assert 5 <= ends <= 9


def test_a_node_whose_head_has_ended_in_order_waits_for_the_next_one_in_silence(kept: Kept) -> None:
    kept.look((1, READY), (2, READY))
    kept.look((1, News("one", [], is_ready=True, exit_code=0, cause="it exited with code 0")))
    kept.look()
    kept.look()
    assert kept.cluster.started == [1, 2, 1]
    assert not kept.lines
