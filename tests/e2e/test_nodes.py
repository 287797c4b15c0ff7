"""`quire serve` over two nodes: the answers of one rank, also when a node is lost under streams."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.e2e.faults.server import FaultyServer
from tests.e2e.mixed_streams import bodies, run
from tests.e2e.serve import QuireServe
from tests.executor.nodes.follower import KEY, Follower, free_port

pytestmark = pytest.mark.long("many cards")

CLIENTS = 16
SETTINGS = ("--dtype", "float32", "--max-restarts", "100")


def test_streams_go_on_when_a_node_or_one_of_its_ranks_is_lost(tmp_path: Path) -> None:
    with QuireServe(*SETTINGS, "--port", "0") as one:
        one.wait_ready()
        wanted = run(one.url, bodies(CLIENTS))
    nodes, port = ("-pp", "2", "--nnodes", "2"), free_port()
    head = (*SETTINGS, *nodes, "--port", "0", "--master-port", str(port))
    faulty = FaultyServer(tmp_path / "fault", *head, environment={"QUIRE_NODE_KEY": KEY})
    with faulty as server, Follower(1, port, *nodes) as lost:
        server.wait_ready()
        assert "nodes       2, each with 1 rank; this is node 0" in server.log
        match = re.search(r"\d+", lost.wait_line("its ranks are processes"))
        assert match
        rank = int(match[0])
        got = server.disturbed(bodies(CLIENTS), lambda: os.kill(rank, signal.SIGKILL))
        server.wait_line(rf"engine process died: Rank 1 of 2 \(process {rank} on node 1, .*started again")
        assert [each.outcome for each in got] == [each.outcome for each in wanted]
        with Follower(1, port, *nodes) as spare:  # waits until the first one is gone
            got = server.disturbed(bodies(CLIENTS), lost.process.kill)
            server.wait_line(r"engine process died: Node 1 \(.*\) with rank 1 of 2 was lost.*started again")
            assert [each.outcome for each in got] == [each.outcome for each in wanted]
            server.signal()
            assert server.wait() == 0
            assert spare.wait() == 0
            assert "The head has ended; so does this node." in spare.log
