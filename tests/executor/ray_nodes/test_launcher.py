"""The server's side of Ray, with a driver that needs none."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest

from quire.errors import ConfigError, EngineDeadError
from quire.foundation.clock import SystemClock
from quire.foundation.config import Config, environment
from quire.runtime.executor.ray_nodes import launcher
from quire.runtime.executor.ray_nodes.launcher import RayNodes, free_port

PLAYED = "tests.executor.ray_nodes.played_driver"


@pytest.fixture(autouse=True)
def _ray_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setenv("QUIRE_NODE_KEY", "")


def settings(does: str, **values: Any) -> Config:
    values = {"pipeline_parallel_size": 3, "nnodes": 3} | values
    return Config().with_values(model=does, distributed_executor_backend="ray", **values)


def nodes(config: Config, lines: list[str] | None = None) -> RayNodes:
    return RayNodes(config, SystemClock(), print if lines is None else lines.append, PLAYED)


def start(config: Config) -> None:
    with nodes(config) as placing:
        placing.place()
        placing.wait_ready()


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"Ray is not installed\. pip install 'quire\[ray\]'"):
        nodes(settings("stays"))


def test_settings_say_where_nodes_are() -> None:
    with nodes(settings("stays")) as placing:
        placing.place()
        placing.wait_ready()
        parallel = placing.placed(settings("stays", max_restarts=7)).parallel
    assert (parallel.nodes, parallel.master_addr) == (3, "10.0.0.1")
    assert parallel.master_port == placing.placed(Config()).parallel.master_port


def test_a_key_is_made_where_none_is_given() -> None:
    nodes(settings("stays"))
    assert len(environment.node_key(None)) == 64
    os.environ["QUIRE_NODE_KEY"] = "the key that was given"
    nodes(settings("stays"))
    assert environment.node_key(None) == b"the key that was given"


def test_all_ranks_are_here_where_no_cluster_runs() -> None:
    with nodes(settings("alone", nnodes=None)) as placing:
        placing.place()
        placing.wait_ready()
        assert placing.placed(settings("alone", nnodes=None)).parallel.nodes == 1


def test_one_node_needs_no_cluster() -> None:
    with nodes(settings("fails", nnodes=1)) as placing:
        placing.place()
        placing.wait_ready()
        assert placing.placed(settings("fails", nnodes=1)).parallel.nodes == 1


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        (settings("fails"), ConfigError, "has 2 nodes, and 3 are needed"),
        (settings("stays", data_parallel_size=2), ConfigError, "--data-parallel-size 2 is not served"),
        (settings("stays", nnodes=2), ConfigError, "Make it a multiple of 2"),
        (settings("stays", node_key_file="/nowhere/key"), ConfigError, "cannot be read"),
        (settings("dies before it is ready"), EngineDeadError, "Ray's driver process died: it exited with code 0"),
    ],
)
def test_a_start_that_fails_says_why(config: Config, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        start(config)


def test_a_driver_that_dies_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "AGAIN_S", 0.05)
    lines: list[str] = []
    with nodes(settings("stays"), lines) as placing:
        placing.place()
        placing.wait_ready()
        first = placing._driver
        assert first is not None
        first.kill()
        for _ in range(1_200):
            if placing._driver is not first:
                break
            placing._is_closed.wait(0.05)
        assert placing._driver is not first
    (line,) = lines
    assert "Ray's driver process died, and its nodes with it: it was ended by SIGKILL" in line
    assert line.endswith("it is started again")


def test_a_port_that_is_taken_is_not_used() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = listener.getsockname()[1]
        assert free_port(taken) not in (taken, 0)
    assert free_port(taken) == taken
