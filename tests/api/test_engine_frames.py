"""GET /engine/frames: agrees with /debug/counts, asks nothing of the engine when nobody looks, and always ends."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.foundation.messages.to_engine import CLIENT_SHIFT
from quire.serving.api.routes import monitoring
from tests.api.scripted import READY, ScriptedClient
from tests.api.server import KEY, Server, resolved, running


@contextmanager
def looking(server: Server, **options: Any) -> Iterator[Iterator[tuple[str, Any]]]:
    """The events of a viewer: names and data."""
    with httpx.stream("GET", server.url + "/engine/frames", timeout=30, **options) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield _events(answer)


def _events(answer: httpx.Response) -> Iterator[tuple[str, Any]]:
    name = ""
    for line in answer.iter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(400):
        if condition():
            return
        threading.Event().wait(0.05)
    raise AssertionError


def num_viewers(server: Server) -> int:
    frames: monitoring.EngineFrames = server.app.state.engine_frames
    return len(frames._viewers)


def test_a_frame_agrees_with_the_counts_and_has_no_text(tmp_path: Path) -> None:
    with running(tmp_path, step_s=0.02, max_num_seqs=2) as server, looking(server) as events:
        counts = server.get("/debug/counts").json()["engine"]
        name, frame = next(events)
        assert (name, frame["state"]) == ("frame", "ready")
        (engine,) = frame["engines"]
        assert engine["counts"] == counts
        body = {"prompt": "the secret of the house", "max_tokens": 400, "stream": True, "ignore_eos": True}
        with (
            httpx.stream("POST", server.url + "/v1/completions", json={**body, "n": 3}) as first,
        ):
            lines = first.iter_lines()
            next(lines)
            wait_until(lambda: next(events)[1]["engines"][0]["counts"]["running"] == 2)
            frame = next(events)[1]
            (engine,) = frame["engines"]
            assert engine["counts"]["waiting"] == len(engine["waiting"]["id"]) == 1
            assert len(set(engine["running"]["id"])) == 2
            assert all(label.startswith("0.") for label in engine["running"]["id"])
            states = engine["blocks"][1]
            assert (
                sum(state in "hHsS" for state in states) == engine["counts"]["blocks"] - engine["counts"]["free_blocks"]
            )
            assert "secret" not in json.dumps(frame)
        server.assert_all_free()
        wait_until(lambda: next(events)[1]["engines"][0]["counts"] == server.get("/debug/counts").json()["engine"])


def test_the_engine_is_asked_only_while_somebody_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitoring, "FRAME_S", 0.01)
    client = ScriptedClient()
    asked = lambda: sum(action == "frame" for action, _ in client.controls)  # noqa: E731
    with Server(resolved(tmp_path), lambda: client) as server:
        client.say(READY)
        server.wait_ready()
        assert asked() == 0
        with looking(server):
            wait_until(lambda: asked() == 1)  # no second one before the answer
        wait_until(lambda: num_viewers(server) == 0)
        wait_until(lambda: server.session.engines.num_controls == 0)
        assert asked() == 1


def test_all_who_look_share_the_frames_and_not_everybody_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitoring, "MAX_VIEWERS", 2)
    with running(tmp_path) as server:
        with looking(server) as first, looking(server) as second:
            number = next(first)[1]["engines"][0]["number"]
            wait_until(lambda: next(second)[1]["engines"][0]["number"] > number)
            refused = server.get("/engine/frames")
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) > 0
        wait_until(lambda: num_viewers(server) == 0)
        with looking(server) as events:
            assert next(events)[0] == "frame"


def test_a_shutdown_ends_the_stream(tmp_path: Path) -> None:
    with running(tmp_path) as server, looking(server) as events:
        assert next(events)[0] == "frame"

        async def drain() -> None:
            server.session.begin_drain()

        server.in_loop(drain())
        rest = list(events)
        assert rest[-1] == ("end", {"state": "draining"})
        wait_until(lambda: num_viewers(server) == 0)


def test_it_needs_the_key(tmp_path: Path) -> None:
    with running(tmp_path, api_key=(KEY,)) as server:
        assert server.get("/engine/frames").status_code == 401
        with looking(server, headers={"Authorization": f"Bearer {KEY}"}) as events:
            assert next(events)[0] == "frame"


def test_ids_are_texts_that_tell_processes_apart() -> None:
    rows = {"id": [5, 3 << CLIENT_SHIFT | 5]}
    engine = {"running": rows, "waiting": {"id": []}, "tables": [(3 << CLIENT_SHIFT | 5, 0, [1])]}
    shown = json.loads(monitoring.picture({"engines": [engine]}))["engines"][0]
    assert shown["running"]["id"] == ["0.5", "3.5"]
    assert shown["tables"] == [["3.5", 0, [1]]]
