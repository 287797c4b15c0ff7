"""Every wrong request gets its own answer, and nobody else notices."""

from __future__ import annotations

import re
import threading

import httpx
import pytest

from tests.api.server import Server, running
from tests.api.wrong_request import WrongRequest
from tests.api.wrong_requests import WRONG_REQUESTS

LEAKS = re.compile(r"Traceback|0x[0-9a-f]{6,}|\.py\b|/[a-z]+/[a-z]+/|site-packages")


@pytest.mark.parametrize("wrong", WRONG_REQUESTS, ids=lambda wrong: wrong.name)
def test_gets_its_status_and_message(server: Server, wrong: WrongRequest) -> None:
    answer = server.http.request(wrong.method, server.url + wrong.path, content=wrong.body, headers=dict(wrong.headers))
    body = answer.json()
    assert list(body) == ["error"]
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert answer.status_code == wrong.status, error
    assert wrong.matches(error["message"]), error
    assert error["param"] == wrong.param
    assert not LEAKS.search(error["message"])
    assert len(error["message"]) < 400


def test_there_are_enough() -> None:
    assert len(WRONG_REQUESTS) >= 60


def test_nothing_is_held_afterwards(server: Server) -> None:
    server.assert_all_free()


def test_a_healthy_stream_is_not_disturbed(tmp_path_factory: pytest.TempPathFactory) -> None:
    text: list[str] = []
    with running(tmp_path_factory.mktemp("model"), step_s=0.002) as server:

        def healthy() -> None:
            body = {"prompt": "a", "max_tokens": 400, "stream": True, "ignore_eos": True}
            with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=30) as answer:
                text.extend(line for line in answer.iter_lines() if line)

        reader = threading.Thread(target=healthy)
        reader.start()
        with httpx.Client(base_url=server.url, timeout=30) as client:
            for wrong in WRONG_REQUESTS:
                answer = client.request(wrong.method, wrong.path, content=wrong.body, headers=dict(wrong.headers))
                assert answer.status_code == wrong.status
        reader.join()
        server.assert_all_free()
    assert text[-1] == "data: [DONE]"
    assert '"finish_reason":"length"' in text[-2]
