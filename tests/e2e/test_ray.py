"""`quire serve` over nodes that Ray starts: the answers of one rank, also when raylets are killed."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.mixed_streams import bodies, run
from tests.e2e.ray_cluster import LocalCluster
from tests.e2e.serve import QuireServe

pytestmark = pytest.mark.long("many cards")
pytest.importorskip("ray")

CLIENTS = 8
SETTINGS = ("--dtype", "float32", "--cpu-threads", "1", "--port", "0", "--max-restarts", "100")
RAY = ("--distributed-executor-backend", "ray")
BODY = {"prompt": "Once upon a time", "max_tokens": 24, "temperature": 0, "ignore_eos": True, "logprobs": 1}


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(4) as cluster:
        yield cluster


def nothing_is_left(cluster: LocalCluster) -> bool:
    """Of servers. What Ray runs for them ends by itself, a little later."""
    deadline = time.monotonic() + 60
    while (left := cluster.processes("quire.")) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not left


def tokens(server: QuireServe) -> list[str]:
    """What it answers, asked again while it says that its engine died too long ago for a request to wait."""
    deadline = time.monotonic() + 180
    while (answer := server.post("/v1/completions", BODY)).status_code == 503 and time.monotonic() < deadline:
        time.sleep(0.5)
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return list(choice["logprobs"]["tokens"])


def test_a_cluster_that_is_too_small_is_refused_with_what_it_has(cluster: LocalCluster) -> None:
    settings = (*SETTINGS, "-pp", "5", *RAY, "--distributed-timeout-seconds", "1")
    with QuireServe(*settings, environment=cluster.environment) as server:
        assert server.wait() == 2
        assert "Ray's cluster has 4 nodes with 1 CPU or more" in server.last_line
        assert "and 5 are needed: one for each stage of --pipeline-parallel-size 5." in server.last_line
    assert nothing_is_left(cluster)


def test_streams_go_on_when_a_raylet_is_killed_and_another_takes_its_place(cluster: LocalCluster) -> None:
    with QuireServe(*SETTINGS) as one:
        one.wait_ready()
        wanted = tokens(one)
        streams = run(one.url, bodies(CLIENTS))
    with QuireServe(*SETTINGS, "-pp", "3", *RAY, environment=cluster.environment) as server:
        server.wait_ready()
        assert "nodes       3, each with 1 rank; this is node 0" in server.log
        assert tokens(server) == wanted
        got = run(server.url, bodies(CLIENTS), cluster.kill_one_with_a_follower)
        server.wait_line(r"engine process died: (Node|Rank) [12].*started again")
        assert [each.outcome for each in got] == [each.outcome for each in streams], "the fourth raylet has taken over"
        cluster.kill_one_with_a_follower()
        server.wait_line(r"Node [12] has no place yet: Ray's cluster has 2 nodes with 1 CPU or more .*3 are needed")
        cluster.add()
        assert tokens(server) == wanted, "a new raylet has"
        server.signal()
        assert server.wait() == 0
        assert re.search(r"node [12]: The head has ended; so does this node\.", server.log)
    assert nothing_is_left(cluster)
