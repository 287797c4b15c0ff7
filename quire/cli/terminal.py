"""Lines that a user types, or that a pipe brings. Knows nothing about what they are for."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress

PROMPT = "> "


def is_typed() -> bool:
    """Whether somebody sits at a terminal, and so wants to be prompted."""
    return sys.stdin.isatty()


def lines() -> Iterator[str]:
    """Until Ctrl-D, Ctrl-C or the end of the pipe. Prompts and a last line break are for people only."""
    typed = is_typed()
    if typed:
        with suppress(ImportError):
            import readline  # noqa: F401  (gives input() history and editing)
    with suppress(EOFError, KeyboardInterrupt):
        while True:
            yield input(PROMPT if typed else "")
    if typed:
        print()
