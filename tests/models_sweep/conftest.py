"""Notes what the sweep finds of each architecture; `--write-models` writes it to a page."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from tests.models_sweep.table import CHECKS, write


class Outcomes:
    """What each check found, by architecture. Reports come from the processes that run tests."""

    def __init__(self, page: Path) -> None:
        self._page = page
        self._found: defaultdict[str, dict[str, str]] = defaultdict(dict)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name, _, architecture = report.nodeid.rpartition("::")[2].removesuffix("]").partition("[")
        if name in CHECKS and (report.when == "call" or report.outcome != "passed"):
            self._found[architecture][name] = report.outcome

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        write(self._page, self._found)
        terminalreporter.write_line(f"{len(self._found)} architectures written to {self._page}")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-models", metavar="PAGE", help="write what is found to the table in this page")


def pytest_configure(config: pytest.Config) -> None:
    if page := config.getoption("--write-models", None):
        config.pluginmanager.register(Outcomes(Path(page)))
