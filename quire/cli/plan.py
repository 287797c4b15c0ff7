"""`quire plan`: the flags; the plan itself is imported by name."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from quire.cli.flags import parse
from quire.tools.sizing.options import DESCRIPTION, PlanOptions


def run(arguments: Sequence[str]) -> int:
    """Plan; the exit code: 0, or 1 if nothing keeps the targets.

    Raises:
        SetupError: A wrong flag, or no plan can be made.
    """
    options = parse(PlanOptions, arguments, "quire plan", DESCRIPTION)
    code: int = importlib.import_module("quire.tools.sizing.command").run(options)
    return code
