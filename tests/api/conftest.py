"""One server of each kind, for all tests that leave it as they found it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api.answer_types import problems
from tests.api.scripted import READY, ScriptedClient
from tests.api.server import ANSWERS, Server, resolved, running
from tests.api.speaker import Speaker, speaking


@pytest.fixture(autouse=True)
def answers_are_of_their_types() -> Iterator[None]:
    """What servers answered in a test is what clients of others take it for."""
    ANSWERS.clear()
    yield
    answers = ANSWERS.copy()
    ANSWERS.clear()
    assert "\n".join(problems(answers)) == ""


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("model")) as server:
        yield server


@pytest.fixture(scope="session")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Speaker]]:
    """A server for conversations, and what its model says."""
    with speaking(tmp_path_factory.mktemp("model"), reasoning_parser="qwen3", max_model_len=2048) as both:
        yield both


@pytest.fixture
def model(conversations: tuple[Server, Speaker]) -> Speaker:
    """What the model of `conversations` says."""
    return conversations[1]


@pytest.fixture
def scripted(tmp_path: Path) -> Iterator[tuple[Server, ScriptedClient]]:
    """A server of its own, ready, and the engine that does what the test says."""
    client = ScriptedClient()
    with Server(resolved(tmp_path), lambda: client) as server:
        client.say(READY)
        yield server.wait_ready(), client
