"""What a notebook shows of work that takes long: a line that is rewritten in place, without ipywidgets."""

from __future__ import annotations

import sys
import time

LEAST_INTERVAL_S = 0.1


def is_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


class StatusLine:
    """A line on standard error that is rewritten in place, ten times a second at most."""

    def __init__(self) -> None:
        self._shown_at = 0.0
        self._width = 0

    def show(self, text: str, end: str = "") -> None:
        """Show a text in place of the last one. With an `end` it is always shown."""
        now = time.monotonic()
        if not end and now - self._shown_at < LEAST_INTERVAL_S:
            return
        self._shown_at = now
        print(f"\r{text:<{self._width}}", end=end, file=sys.stderr, flush=True)
        self._width = len(text)
