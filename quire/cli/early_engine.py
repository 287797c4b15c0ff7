"""An engine's process that is begun while `quire serve` still imports its modules and chooses its settings.

Both take some 0.5 s, so on two cores a server is ready that much earlier.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from quire.cli.interrupts import ended_by_interrupt
from quire.foundation.processes.begun_process import BegunProcess
from quire.runtime.executor.early_loading import torch_is_for_cpus

if TYPE_CHECKING:  # imported once the engine has begun
    from quire.foundation.processes.child_process import ChildProcess
    from quire.foundation.processes.launch import LaunchConfig

MODULE, ENGINE = "quire.engine.early_start", "quire.engine.start"
_STARTS_NONE = {"-h", "--help", "--headless"}
"""Flags of commands that start no engine here."""


def serve(arguments: Sequence[str]) -> int:
    """Run `quire serve`; returns its exit code. Raises SetupError if the server cannot start."""
    with EarlyEngine(begins=not _STARTS_NONE & set(arguments)) as early:
        from quire.foundation.processes.garbage import no_collection

        with ended_by_interrupt(), no_collection():
            from quire.cli.serve import run  # takes half a second, for which the engine is not to wait
        return run(arguments, early.start)


class EarlyEngine:
    """A context in which the first engine that is started may be a process that was begun before, if one `begins`.

    It is if torch was built for CPUs and the engine has one rank: others load other libraries, or inherit
    descriptors. If no engine is started, the process ends with the context.
    """

    def __init__(self, *, begins: bool = True) -> None:
        self._begun = BegunProcess(MODULE) if begins and torch_is_for_cpus() else None

    def __enter__(self) -> EarlyEngine:
        return self

    def __exit__(self, *error: object) -> None:
        if self._begun is not None:
            self._begun.end()

    def start(self, name: str, module: str, launch: LaunchConfig) -> ChildProcess:
        """Start a child, as ProcessHost has it."""
        from quire.foundation.processes.child_process import ChildProcess

        if self._begun is None or module != ENGINE or launch.config.parallel.ranks > 1 or launch.inherited_fds:
            return ChildProcess(name, module, launch)
        begun, self._begun = self._begun, None
        return ChildProcess(name, module, launch, begun=begun)
