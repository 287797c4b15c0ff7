"""Notes what the sweep finds of each architecture; `--write-models` writes it to a page."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.models_sweep import fallback_table
from tests.models_sweep.fallback_table import Found
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


class FallbackOutcomes:
    """What was found of each model type of transformers. Reports come from the processes that run tests.

    Args:
        page: The page to write.
        noted: The name under which tests note a model type and its class.
        write: Writes a page.
    """

    def __init__(self, page: Path, noted: str, write: Callable[[Path, Found], None]) -> None:
        self._page, self._noted, self._write = page, noted, write
        self._found: dict[str, tuple[str, str, str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        noted: dict[str, Any] = dict(report.user_properties)
        if self._noted not in noted or report.when != "call":
            return
        name, architecture = noted[self._noted]
        outcome, reason = noted.get("outcome", ("wrong", str(report.longrepr).strip().splitlines()[-1]))
        self._found[name] = architecture, outcome, reason

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._found:
            self._write(self._page, self._found)
            terminalreporter.write_line(f"{len(self._found)} model types written to {self._page}")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-fallback", metavar="PAGE", help="write what is found of transformers to this page")
    parser.addoption("--write-images", metavar="PAGE", help="write what is found of images to this page")
    parser.addoption("--write-models", metavar="PAGE", help="write what is found to the table in this page")


def pytest_configure(config: pytest.Config) -> None:
    if page := config.getoption("--write-models", None):
        config.pluginmanager.register(Outcomes(Path(page)))
    if page := config.getoption("--write-fallback", None):
        config.pluginmanager.register(FallbackOutcomes(Path(page), "model", fallback_table.write))
    if page := config.getoption("--write-images", None):
        config.pluginmanager.register(FallbackOutcomes(Path(page), "images_model", fallback_table.write_images))
