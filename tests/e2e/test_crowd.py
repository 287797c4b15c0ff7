"""A crowd of prompts that nearly fill the context does not keep a short request waiting."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import httpx
import pytest

from tests.e2e.serve import QuireServe

CROWD, PROMPT = 40, 1_950
ENOUGH_S = 3.0


@pytest.mark.long("reliability")
def test_a_short_request_beside_a_crowd_of_near_full_prompts() -> None:
    rng = random.Random(0)
    with QuireServe("--port", "0", "--max-queue-time", "300") as server:
        url = server.wait_ready().url + "/v1/completions"

        def ask(body: dict[str, Any]) -> httpx.Response:
            return httpx.post(url, json=body | {"ignore_eos": True, "temperature": 0}, timeout=600)

        short = {"prompt": "The sea", "max_tokens": 5}
        assert ask(short).status_code == 200
        crowd = [{"prompt": [rng.randrange(300, 4_000) for _ in range(PROMPT)], "max_tokens": 8} for _ in range(CROWD)]
        answers: list[httpx.Response] = []
        threads = [threading.Thread(target=lambda body=body: answers.append(ask(body))) for body in crowd]
        began = time.monotonic()
        for thread in threads:
            thread.start()
        while server_load(server) + len(answers) < CROWD:  # some may be answered before the last is there
            time.sleep(0.01)
        waits = []
        while len(answers) < CROWD - 8:
            sent = time.monotonic()
            assert ask(short).status_code == 200
            waits.append(time.monotonic() - sent)
        for thread in threads:
            thread.join()
        took = time.monotonic() - began
    print(f"the crowd took {took:.1f} s; short requests beside it {[f'{wait:.2f}' for wait in waits]} s")
    assert [answer.status_code for answer in answers] == [200] * CROWD
    assert waits
    assert max(waits) < max(ENOUGH_S, took / 5), "with five tokens each"


def server_load(server: QuireServe) -> int:
    load: int = httpx.get(server.url + "/load", timeout=60).json()["server_load"]
    return load
