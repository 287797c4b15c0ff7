"""A server that fails, or takes its time, when a test says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.e2e.faults.engine import FAULT_FILE
from tests.e2e.mixed_streams import Streamed, run
from tests.e2e.serve import QuireServe


class FaultyServer(QuireServe):
    """See faults/serve.py.

    Args:
        fault_file: Where faults are planted; no such file is there yet.
        arguments: Of `quire serve`.
        environment: Added to this process's.
    """

    def __init__(self, fault_file: Path, *arguments: str, environment: dict[str, str] | None = None) -> None:
        self._fault_file = fault_file
        own = {FAULT_FILE: str(fault_file), **(environment or {})}
        super().__init__(*arguments, environment=own, command=("tests.e2e.faults.serve",))

    def wait_ready(self) -> FaultyServer:
        """Until it says its address."""
        super().wait_ready()
        return self

    def plant(self, fault: str) -> None:
        """The engine fails so at its next step."""
        written = self._fault_file.with_suffix(".new")
        written.write_text(fault)
        written.replace(self._fault_file)  # at once: a step between making a file and writing it would find nothing

    @property
    def is_planted(self) -> bool:
        """Whether the engine has not seen it yet."""
        return self._fault_file.exists()

    def clear(self) -> None:
        """Nothing is planted any more."""
        self._fault_file.unlink(missing_ok=True)

    @contextmanager
    def unhurried(self) -> Iterator[None]:
        """Every step takes its time, so that what is read of a stream comes in pieces."""
        self.plant("always unhurried")
        try:
            yield
        finally:
            self.clear()

    def disturbed(self, requests: list[dict[str, Any]], disturb: Callable[[], None]) -> list[Streamed]:
        """What streams get to which this happens. Steps take their time until then, so that it happens to streams that
        are under way, however late they are read here."""
        with ExitStack() as slow:
            slow.enter_context(self.unhurried())

            def hurry_and_disturb() -> None:
                slow.close()  # for good: what is planted then stays
                disturb()

            return run(self.url, requests, hurry_and_disturb)
