"""`quire check-quant`: the flags; the check itself loads torch and is imported by name."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from quire.cli.flags import parse
from quire.tools.quant_check.options import DESCRIPTION, CheckOptions


def run(arguments: Sequence[str]) -> int:
    """Compare two models; the exit code: 0 if the quantized one is good, 1 if it is not or nothing can be said.

    Raises:
        SetupError: A wrong flag, or models that cannot be compared.
    """
    options = parse(CheckOptions, arguments, "quire check-quant", DESCRIPTION)
    code: int = importlib.import_module("quire.tools.quant_check.check").run(options)
    return code
