"""`quire simulate`: the flags; the simulation itself is imported by name."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from quire.cli.flags import parse
from quire.tools.simulation.options import DESCRIPTION, SimulateOptions


def run(arguments: Sequence[str]) -> int:
    """Simulate; the exit code: 0, or 1 if the limits of --slo are not kept.

    Raises:
        QuireError: A wrong flag, or nothing can be simulated.
    """
    options = parse(SimulateOptions, arguments, "quire simulate", DESCRIPTION)
    code: int = importlib.import_module("quire.tools.simulation.command").run(options)
    return code
