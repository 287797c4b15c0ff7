"""What all tests share: those for a GPU are skipped without one; long ones may take longer, and report their time; what
is drawn without a seed is the same in each run, and so are Hypothesis's examples."""

from __future__ import annotations

import gc
import os
import random
import signal
import zlib
from collections import Counter
from collections.abc import Generator, Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    # Kernels run under Triton's interpreter, which Triton asks for when it is first imported: transformers imports it.
    os.environ["TRITON_INTERPRET"] = "1"

# `--hypothesis-profile=default` tries examples that are new each time. No example is too slow on some machine.
settings.register_profile("same", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("same")

LONG_TIMEOUT_S = 900
BUDGET_MINUTES = {"engine": 12, "api": 8, "reliability": 14, "many cards": 8, "operations": 7}
"""What `make test-long` may take at most, by the share that a test names in its marker; see CONTRIBUTING.md."""
SHARES_BESIDE_OTHERS = ("api", "engine", "many cards", "operations")
"""No test of these watches how long anything takes, so that they run in several processes at once."""


class SecondsByShare:
    """What the long tests of each share took. Reports come from the processes that run tests, with their share."""

    def __init__(self) -> None:
        self._seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, share in report.user_properties:
            if name == "share":
                self._seconds[str(share)] += report.duration

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for share, seconds in sorted(self._seconds.items()):
            terminalreporter.write_line(f"long tests, {share}: {seconds / 60:.1f} of {BUDGET_MINUTES[share]} minutes")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(SecondsByShare())


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """A million objects live as long as the tests. Searching them for cycles, which there are none of, takes as long as
    making them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU")
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(skip)
        if (long := item.get_closest_marker("long")) is not None:
            if long.args[0] not in BUDGET_MINUTES:
                raise pytest.UsageError(f"{item.nodeid}: a long test names its share, one of {list(BUDGET_MINUTES)}")
            if not _names_the_marker(item.path):
                raise pytest.UsageError(f"{item.nodeid}: `make test-long` takes files that have `mark.long` in them")
            item.add_marker(pytest.mark.timeout(LONG_TIMEOUT_S))
            item.user_properties.append(("share", long.args[0]))
            if long.args[0] in SHARES_BESIDE_OTHERS:
                item.add_marker("beside_others")


@cache
def _names_the_marker(path: Path) -> bool:
    return "mark.long" in path.read_text()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Each test draws the same, whatever ran before it in its process: otherwise one that fails cannot be seen again,
    and what is true of nearly all numbers fails once in a while."""
    # Tests send themselves Ctrl-C. uvloop leaves its own handler behind, and a shell's background job has none.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _seed(0)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object]) -> Generator[None, object, object]:
    """A fixture that several tests share draws the same whichever of them comes first, and the first draws what it does
    when it is not."""
    if fixturedef.scope == "function":
        return (yield)
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    _seed(zlib.crc32(fixturedef.argname.encode()))
    try:
        return (yield)
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@pytest.fixture(scope="module")
def always_drafting() -> Iterator[None]:
    """Speculation proposes as many drafts as it may, however little that pays: tests' models are as fast as their
    drafts."""
    from quire.runtime.worker.speculation.draft_lengths import Choice, DraftLengths

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DraftLengths, "choose", lambda self, tokens, slots, most: Choice(most, 1e6))
        yield
