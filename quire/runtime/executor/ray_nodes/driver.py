"""The process that asks Ray for the other nodes of an engine and keeps them running; `quire serve` starts it.

The process is Ray's driver, so actors and placement group end with it. It outlives engines, as followers do.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from quire.errors import ConfigError
from quire.foundation.clock import SystemClock
from quire.foundation.config import Config, ServerConfig, environment
from quire.foundation.processes.child_main import run_child
from quire.foundation.processes.launch import LaunchConfig, NodesPlaced, SendReport, StatusReport
from quire.runtime.executor.nodes.roll_call import NODES_PATIENCE_S, SAY_AFTER_S
from quire.runtime.executor.ray_nodes.node_keeper import NodeKeeper, Placement, placement_for

if TYPE_CHECKING:
    from quire.runtime.executor.ray_nodes.ray_cluster import RayCluster

DEFAULT_ADDRESS = Config().parallel.master_addr
JOIN_S = 30.0
"""How long a cluster may take to answer."""
_LOOK_S = 1.0
_log = logging.getLogger("quire.ray")


def main(launch: LaunchConfig, report: SendReport) -> None:
    """Place the nodes, report NodesPlaced, start them, report ready; then keep them running until the parent is gone.

    Raises:
        ConfigError: The cluster does not have what is needed.
        SetupError: A node has failed.
        EngineDeadError: A node did not start in time.
    """
    config = launch.config
    _log.setLevel(logging.INFO)
    placement = placement_for(config)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # where Ray prints the logs of raylets that die
    cluster = _join(config, placement, report)
    if cluster is None:
        report(NodesPlaced(1, config.parallel.master_addr))
        return
    clock = SystemClock()
    patience_s = float(config.parallel.distributed_timeout_seconds or NODES_PATIENCE_S)
    say = partial(_say, config)
    _reserve(cluster, placement, patience_s, clock, say)
    asked = config.parallel.master_addr
    address = cluster.own_address if asked == DEFAULT_ADDRESS else asked
    report(NodesPlaced(placement.nodes, address))
    key = environment.node_key(config.parallel.node_key_file)
    for node in range(1, placement.nodes):
        follower = LaunchConfig(follower_config(config, node, placement.nodes, address), "")
        cluster.launch(node, msgspec.json.encode(follower), key)
    keeper = NodeKeeper(cluster, placement, clock, say)
    keeper.start_all(patience_s)
    report(StatusReport("ready"))
    while True:
        keeper.look(_LOOK_S)


def _join(config: Config, placement: Placement, report: SendReport) -> RayCluster | None:
    """Join Ray's cluster; None if none runs and all ranks may be on this machine."""
    environment.prepare_ray()
    from quire.runtime.executor.ray_nodes.ray_cluster import RayCluster  # after what it reads is set

    address = environment.ray_address()
    where = f"at {address} (RAY_ADDRESS)" if address else "on this machine"
    needed = f"{placement.nodes} nodes are needed: {placement.reason}"
    if address.startswith("ray://"):
        raise ConfigError(
            f"RAY_ADDRESS is {address}: the server has to be on a machine of the cluster. Give the address that 'ray "
            "start' said, or unset it.",
            param="distributed_executor_backend",
        )
    unreachable = threading.Timer(JOIN_S, _give_up, (f"Ray's cluster {where} does not answer, and {needed}.", report))
    unreachable.start()
    try:
        return RayCluster(address)
    except (ConnectionError, RuntimeError, ValueError) as error:
        if config.parallel.nnodes is None and not address and isinstance(error, ConnectionError):
            _say(config, 0, "No Ray cluster runs on this machine: all ranks are started here")
            return None
        raise ConfigError(
            f"No Ray cluster {where} can be joined, and {needed}. Start one by 'ray start --head', and 'ray start "
            f"--address' on the other machines. Ray says: {' '.join(str(error).split())}",
            param="distributed_executor_backend",
        ) from error
    finally:
        unreachable.cancel()


def _give_up(why: str, report: SendReport) -> None:
    """Report a failure and exit at once: Ray itself would try for minutes, and nothing else can end that."""
    report(StatusReport("failed", ConfigError.__name__, f"{why} See 'ray status'."))
    os._exit(ConfigError.exit_code)


def _reserve(
    cluster: RayCluster, placement: Placement, patience_s: float, clock: SystemClock, say: Callable[[int, str], None]
) -> None:
    """Wait for the places of all nodes."""
    if why := placement.head_shortage(cluster.machines(), cluster.own_id):
        raise ConfigError(why, param="distributed_executor_backend")
    cluster.reserve(placement)
    began, said = clock.now(), False
    while not cluster.has_places(_LOOK_S):
        waited = clock.now() - began
        if waited > patience_s:
            raise ConfigError(
                f"{placement.shortage(cluster.machines())}. Within {patience_s:g} s no more came. Add machines by 'ray "
                "start', or put several stages on each by --nnodes.",
                param="nnodes",
            )
        if waited > SAY_AFTER_S and not said:
            said = True
            say(0, f"Waiting for nodes: {placement.shortage(cluster.machines())}")


def follower_config(config: Config, node: int, nodes: int, address: str) -> Config:
    """The settings that node `node` gets: as they were asked for, without what only the head needs to know. Relative
    paths become absolute, because the node's process has another directory."""
    model = config.model
    parallel = replace(
        config.parallel, distributed_executor_backend=None, nnodes=nodes, node_rank=node, master_addr=address,
        node_key_file=None,
    )  # fmt: skip
    return replace(
        config,
        server=ServerConfig(headless=True),
        parallel=parallel,
        model=replace(model, model=_absolute(model.model), tokenizer=model.tokenizer and _absolute(model.tokenizer)),
    )


def _absolute(name: str) -> str:
    path = Path(name)
    return str(path.absolute()) if path.exists() else name


def _say(config: Config, node: int, line: str) -> None:
    """Print a line of a node, or a line about nodes (0). What a node logs as JSON names the node itself."""
    is_json = config.observability.log_format == "json"
    if is_json and not node:
        _log.info("%s", line)
    else:
        print(f"node {node}: {line}" if node and not is_json else line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    run_child(main, "ray")
