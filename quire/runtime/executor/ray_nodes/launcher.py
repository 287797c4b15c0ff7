"""The server's side of Ray: starts the driver process, learns where nodes are, and starts another driver if it dies.

Only the driver imports Ray, in a process of its own, so that nothing that happens to Ray happens to the server.
"""

from __future__ import annotations

import importlib.util
import secrets
import select
import selectors
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from quire.errors import ConfigError, EngineDeadError
from quire.foundation.clock import Clock
from quire.foundation.config import Config, environment
from quire.foundation.processes.child_main import raise_reported_failure
from quire.foundation.processes.child_process import ChildProcess
from quire.foundation.processes.launch import LaunchConfig, NodesPlaced, Report, StatusReport
from quire.planning.rank_checks import check_nodes
from quire.runtime.executor.nodes.roll_call import NODES_PATIENCE_S
from quire.runtime.executor.ray_nodes.node_keeper import wanted_nodes

DRIVER = "quire.runtime.executor.ray_nodes.driver"
AGAIN_S = 5.0
"""Seconds between a driver's death and the start of the next one."""
_DRIVER_START_S = 120.0
"""Seconds that a driver gets beyond the time that nodes get."""
_END_S = 5.0


class RayNodes:
    """A context in which Ray runs the other nodes of an engine.

    Args:
        config: The settings as they were asked for, with `ray` among them.
        clock: For how long it waits.
        say: Prints a line of the log.
        module: The module that the driver runs.

    Raises:
        ConfigError: Ray is not installed.
    """

    def __init__(self, config: Config, clock: Clock, say: Callable[[str], None], module: str = DRIVER) -> None:
        if importlib.util.find_spec("ray") is None:
            raise ConfigError(
                "--distributed-executor-backend ray: Ray is not installed. pip install 'quire[ray]', on all machines.",
                param="distributed_executor_backend",
            )
        self._clock = clock
        self._say = say
        self._module = module
        parallel = config.parallel
        self._patience_s = float(parallel.distributed_timeout_seconds or NODES_PATIENCE_S) + _DRIVER_START_S
        if parallel.node_key_file is None and not environment.has_node_key():
            environment.share_node_key(secrets.token_hex(32).encode())
        environment.node_key(parallel.node_key_file)  # or an error at once
        port = free_port(parallel.master_port)
        self._config = replace(config, parallel=replace(parallel, master_port=port))
        self._driver: ChildProcess | None = None
        self._reports: list[Report] = []
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        self._watcher: threading.Thread | None = None

    def __enter__(self) -> RayNodes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def place(self) -> None:
        """Find out where nodes will be, and begin to start them.

        Raises:
            SetupError: The settings contradict one another, or the cluster does not have what is needed.
            EngineDeadError: Ray does not answer.
        """
        nodes = wanted_nodes(parallel := self._config.parallel)
        check_nodes(replace(self._config, parallel=replace(parallel, nnodes=nodes)))
        if nodes == 1:
            return
        self._driver = self._new_driver()
        placed = self._next_report()
        assert isinstance(placed, NodesPlaced), placed
        parallel = replace(parallel, nnodes=placed.nodes, master_addr=placed.address)
        if placed.nodes == 1:
            self._end()
        self._config = replace(self._config, parallel=parallel)

    def placed(self, config: Config) -> Config:
        """Add what `place` has found out to these settings."""
        own = self._config.parallel
        parallel = replace(config.parallel, nnodes=own.nodes, master_addr=own.master_addr, master_port=own.master_port)
        return replace(config, parallel=parallel)

    def wait_ready(self) -> None:
        """Wait until all nodes are ready for an engine. From then on a driver that dies is started again.

        Raises:
            SetupError: A node has failed.
            EngineDeadError: A node did not start in time.
        """
        if self._driver is None:
            return
        self._next_report()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def close(self) -> None:
        """End the nodes."""
        self._is_closed.set()
        self._end()
        if self._watcher is not None:
            self._watcher.join(_END_S)

    # --- below --------------------------------------------------------------------------------------------------------

    def _new_driver(self) -> ChildProcess:
        return ChildProcess("ray", self._module, LaunchConfig(self._config, ""))

    def _end(self) -> None:
        with self._lock:
            driver, self._driver = self._driver, None
        if driver is not None:
            driver.kill()
            driver.cause_of_death()
            driver.close()

    def _next_report(self) -> Report:
        """Wait for the driver's next report.

        Raises:
            SetupError: The driver has failed in its setup.
            EngineDeadError: The driver has failed otherwise, or reports nothing.
        """
        assert self._driver is not None
        deadline = self._clock.now() + self._patience_s
        with selectors.EpollSelector() as selector:
            selector.register(self._driver.report_fd, selectors.EVENT_READ)
            selector.register(self._driver.pid_fd, selectors.EVENT_READ)
            while not self._reports:
                left = deadline - self._clock.now()
                if left <= 0:
                    raise EngineDeadError(f"Ray did not answer within {self._patience_s:g} s: see 'ray status'.")
                selector.select(left)
                has_ended = self._driver.exit_code() is not None
                self._reports += self._driver.reports()
                if has_ended and not self._reports:
                    raise EngineDeadError(f"Ray's driver process died: {self._driver.cause_of_death()}.")
        report = self._reports.pop(0)
        if isinstance(report, StatusReport) and report.state == "failed":
            if report.error:
                raise_reported_failure(report)
            raise EngineDeadError(report.message)
        return report

    def _watch(self) -> None:
        """Start a driver again when it dies, in a thread of its own, for as long as the server runs."""
        driver = self._driver
        while driver is not None:
            ended = select.poll()
            ended.register(driver.pid_fd, select.POLLIN)
            ended.poll(1000 * AGAIN_S)
            if self._is_closed.is_set():
                return
            if driver.exit_code() is None:
                continue
            cause = driver.cause_of_death()
            self._say(f"Ray's driver process died, and its nodes with it: {cause}; it is started again")
            driver.close()
            if self._is_closed.wait(AGAIN_S):
                return
            with self._lock:
                if self._is_closed.is_set():
                    return
                self._driver = driver = self._new_driver()


def free_port(preferred: int) -> int:
    """The preferred port if it is free, otherwise any free one."""
    for port in (preferred, 0):
        with suppress(OSError, OverflowError), socket.create_server(("", port)) as listener:
            free: int = listener.getsockname()[1]
            return free
    return preferred
