"""What all tests share: those for a GPU are skipped without one; long ones may take longer, and report their time."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

LONG_TIMEOUT_S = 900
BUDGET_MINUTES = {"engine": 8, "api": 6, "reliability": 14, "many cards": 10, "operations": 7}
"""What `make test-long` may take at most, by the share that a test names in its marker; see CONTRIBUTING.md."""
seconds_by_share = pytest.StashKey[Counter[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[seconds_by_share] = Counter()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU")
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(skip)
        if (long := item.get_closest_marker("long")) is not None:
            if long.args[0] not in BUDGET_MINUTES:
                raise pytest.UsageError(f"{item.nodeid}: a long test names its share, one of {list(BUDGET_MINUTES)}")
            item.add_marker(pytest.mark.timeout(LONG_TIMEOUT_S))
            item.user_properties.append(("share", long.args[0]))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> object:
    for name, share in item.user_properties:
        if name == "share":
            item.config.stash[seconds_by_share][str(share)] += call.duration
    return (yield)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for share, seconds in sorted(config.stash[seconds_by_share].items()):
        terminalreporter.write_line(f"long tests, {share}: {seconds / 60:.1f} of {BUDGET_MINUTES[share]} minutes")
