"""One server on the built-in model for all clients, behind a recorder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.clients.recorder import Exchange, Recorder
from tests.clients.validation import check
from tests.e2e.serve import QuireServe

KEY = "a key of ours"


@dataclass(frozen=True)
class Quill:
    """A server on Quill, as a client sees it; what it is asked is recorded.

    Attributes:
        direct: Its address without the recorder.
    """

    url: str
    direct: str
    key: str
    exchanges: list[Exchange]

    @property
    def paths(self) -> list[str]:
        """What was asked, in order."""
        return [exchange.path for exchange in self.exchanges]


@pytest.fixture(scope="session")
def recorded() -> Iterator[tuple[Recorder, str]]:
    with QuireServe("--port", "0", "--api-key", KEY, "--max-num-seqs", "16") as server:
        server.wait_ready()
        with Recorder(server.url) as recorder:
            yield recorder, server.url


@pytest.fixture
def quill(recorded: tuple[Recorder, str]) -> Iterator[Quill]:
    """Afterwards everything that was answered is checked."""
    recorder, direct = recorded
    recorder.exchanges.clear()
    yield Quill(recorder.url, direct, KEY, recorder.exchanges)
    check(recorder.exchanges)


def leave_refused_threads(quill: Quill) -> None:
    """Forget requests for a conversation that the server keeps: refused, after which Anthropic's tool runners send the
    whole conversation instead."""
    refused = [exchange for exchange in quill.exchanges if "thread" in exchange.sent]
    assert {exchange.status for exchange in refused} <= {400}
    quill.exchanges[:] = [exchange for exchange in quill.exchanges if exchange not in refused]
