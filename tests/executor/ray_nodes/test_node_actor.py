"""What Ray's actor does on a node, without Ray: its follower's lines, its end, and that it takes it along."""

from __future__ import annotations

import os
import signal
import time

import msgspec
import pytest

from quire.foundation.config import Config
from quire.foundation.processes.child_process import process_state
from quire.foundation.processes.launch import LaunchConfig
from quire.runtime.executor.ray_nodes.node_actor import News, NodeActor

PLAYED = "tests.executor.ray_nodes.played_follower"
KEY = b"a key that all nodes have"


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("QUIRE_NODE_KEY", "what was there before")


def actor(does: str) -> NodeActor:
    return NodeActor(msgspec.json.encode(LaunchConfig(Config().with_values(model=does), "")), KEY, PLAYED)


def all_news(node: NodeActor, lines: int | None = None) -> News:
    """What it says until it has said so many lines, or has ended."""
    found: list[str] = []
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        news = node.news(0.5)
        found += news.lines
        if news.exit_code is not None or (lines is not None and len(found) >= lines):
            return news._replace(lines=found)
    raise AssertionError(found)


def test_a_follower_has_the_key_and_all_threads() -> None:
    news = all_news(actor("ends"))
    assert news.lines[0] == f"key {KEY.decode()}, threads None"
    assert (news.is_ready, news.exit_code, news.error) == (True, 0, "")


def test_what_a_follower_says_before_it_dies_is_not_lost_where_it_dies_during_a_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = actor("stays")

    def dies_after_nothing_came(wait_s: float) -> tuple[list[str], bool]:
        deadline = time.monotonic() + 120
        while node._lines.qsize() < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        node._child.kill()
        while node._child.exit_code() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return [], False

    with monkeypatch.context() as patch:
        patch.setattr(node, "_new_lines", dies_after_nothing_came)
        assert node.news(0.5).exit_code is None
    news = all_news(node)
    assert (len(news.lines), news.is_ready, news.exit_code) == (2, True, -signal.SIGKILL)


def test_a_follower_that_fails_says_why() -> None:
    news = all_news(actor("missing"))
    assert (news.is_ready, news.exit_code, news.error) == (False, 3, "ModelNotFoundError")
    assert news.cause == "No such model here"


def test_a_follower_ends_with_its_actor() -> None:
    node = actor("stays")
    news = all_news(node, lines=2)
    assert news.exit_code is None
    pid = int(news.lines[1].split()[1])
    node._child.close()  # as the kernel does when the actor's process is gone
    deadline = time.monotonic() + 60
    while process_state(pid) not in ("", "Z", None) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert process_state(pid) in ("", "Z", None)
    os.waitpid(pid, 0)
