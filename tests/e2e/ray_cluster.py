"""A Ray cluster on this machine: raylets that are nodes, each a process, and what runs under them."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
import uuid
from pathlib import Path
from types import TracebackType
from typing import Any

MARK = "QUIRE_TEST_RAY_CLUSTER"
_GONE_S = 60.0


class LocalCluster:
    """A context in which a cluster runs; its end waits until no process of it is left.

    Args:
        raylets: How many nodes it has, the driver's among them.
        cpus: Of each.

    Attributes:
        environment: Variables for a server that is to join it.
    """

    def __init__(self, raylets: int, cpus: int = 1) -> None:
        self._mark = uuid.uuid4().hex
        self._raylets = raylets
        self._cpus = cpus
        self._cluster: Any = None
        self.nodes: list[Any] = []
        self.environment: dict[str, str] = {}

    def __enter__(self) -> LocalCluster:
        self._directory = Path(tempfile.mkdtemp(prefix="ray-"))  # short: sockets lie in it
        (self._directory / "ray").mkdir()
        variables = {MARK: self._mark, "RAY_TMPDIR": str(self._directory), "RAY_USAGE_STATS_ENABLED": "0"}
        self._before = {name: os.environ.get(name) for name in variables}
        os.environ |= variables
        try:
            self._start()
        except BaseException:
            self._end()
            raise
        self.environment = {MARK: self._mark, "RAY_ADDRESS": str(self._cluster.address)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        left = self._end()
        assert error is not None or not left, "processes of the cluster have outlived it"

    def add(self) -> None:
        """Another raylet."""
        self.nodes.append(self._cluster.add_node(**self._settings()))

    def kill_one_with_a_follower(self) -> None:
        """End a raylet under which a node of an engine runs, by SIGKILL."""
        raylets = {self._raylet(node): node for node in self.nodes}
        for pid in self.processes("quire.cli.ray_node"):
            while pid > 1 and pid not in raylets:
                pid = _parent(pid)
            if pid in raylets:
                self._cluster.remove_node(raylets[pid], allow_graceful=False)
                self.nodes.remove(raylets[pid])
                return
        raise AssertionError("no raylet has a follower")

    def processes(self, word: str = "") -> list[int]:
        """Those of the cluster, and of servers that have its environment, with that word in their command line."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                mine = f"{MARK}={self._mark}".encode() in (entry / "environ").read_bytes().split(b"\0")
                if mine and word.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except (OSError, ValueError):
                continue
        return found

    # --- below --------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        from ray.cluster_utils import Cluster  # after the variables are set

        head = self._settings() | {
            "include_dashboard": False,
            # A node that is gone is found so soon.
            "_system_config": {
                "health_check_initial_delay_ms": 0,
                "health_check_period_ms": 500,
                "health_check_failure_threshold": 4,
            },
        }
        self._cluster = Cluster()
        self._cluster.add_node(**head)
        for _ in range(self._raylets - 1):
            self.add()

    def _end(self) -> list[int]:
        """End all; processes that had to be killed."""
        if self._cluster is not None:
            self._cluster.shutdown()
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        left = self._wait_for_the_end()
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self._directory, ignore_errors=True)
        return left

    def _wait_for_the_end(self) -> list[int]:
        deadline = time.monotonic() + _GONE_S
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left

    def _settings(self) -> dict[str, Any]:
        return {"num_cpus": self._cpus, "object_store_memory": 80 << 20}

    @staticmethod
    def _raylet(node: Any) -> int:
        (raylet,) = node.all_processes["raylet"]
        return int(raylet.process.pid)


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except OSError:
        return 0
