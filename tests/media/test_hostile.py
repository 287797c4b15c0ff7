"""Media that mean harm, sent to real processes: no one dies, nobody else waits, and the memory comes back."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.machine_share import MachineShare
from tests.e2e.process_usage import PROMPT_MALLOC, usage
from tests.e2e.serve import QuireServe
from tests.media.checkpoints import file_of, make_llava, picture
from tests.media.hostile import HARMFUL, ODD, PNG, data_url, large
from tests.media.test_fetch import host

__all__ = ["host"]
pytestmark = pytest.mark.long("reliability")
STALL_S, BUSY_STALL_S = 1.0, 5.0
"""Longest wait of a stream for its next token, without the time that others took; the second where others took more
than BUSY of the machine."""
BUSY = 0.25
GROWTH = 150 * 10**6
LONG = {"max_position_embeddings": 2048}
"""So that an answer is under way for a second at least."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[QuireServe, Path]]:
    directory = tmp_path_factory.mktemp("hostile")
    (directory / "media").mkdir()
    (directory / "secret.png").write_bytes(PNG)
    (directory / "media" / "link.png").symlink_to(directory / "secret.png")
    model = make_llava(directory / "model", text=LONG)
    with QuireServe(
        "--model", str(model), "--served-model-name", "tiny", "--dtype", "float32", "--device", "cpu", "--port", "0",
        "--max-num-seqs", "16", "--allowed-media-domains", "127.0.0.1/32", "--allowed-local-media-path",
        str(directory / "media"), "--disable-responses-store", environment=PROMPT_MALLOC,
    ) as server:  # fmt: skip
        yield server.wait_ready(), directory / "media"


def chat(url: str) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What?"}]
    return {"model": "tiny", "messages": [{"role": "user", "content": parts}], "max_tokens": 2, "temperature": 0}


class Stream(threading.Thread):
    """Reads answers of text one after the other, and notes how long it waited for each token."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._url = url
        self.over = threading.Event()
        self.waits: list[tuple[float, float]] = []
        self.answers = 0

    def run(self) -> None:
        body = {"model": "tiny", "prompt": "Hello", "max_tokens": 400, "ignore_eos": True, "stream": True}
        while not self.over.is_set():
            last = 0.0
            with httpx.stream("POST", f"{self._url}/v1/completions", json=body, timeout=60) as found:
                assert found.status_code == 200
                for _ in found.iter_lines():
                    now = time.monotonic()
                    if last:
                        self.waits.append((last, now))
                    last = now
            self.answers += 1

    def longest(self, machine: MachineShare) -> float:
        return max(end - begin - machine.lost(begin, end) for begin, end in self.waits)


def resident(server: QuireServe) -> int:
    """Resident bytes of one process of each kind: a server starts more readers where it has more cores."""
    return sum(each.rss // each.processes for each in usage(server.process.pid).values())


def settled(server: QuireServe, most: int) -> int:
    """Resident bytes, once they are few enough or half a minute is over."""
    deadline = time.monotonic() + 30
    while (found := resident(server)) > most and time.monotonic() < deadline:
        time.sleep(0.2)
    return found


def test_harmful_media_harm_nobody(served: tuple[QuireServe, Path], host: int) -> None:
    server, media = served
    here = f"http://127.0.0.1:{host}"
    urls = HARMFUL | {
        "a redirect to metadata": f"{here}/to/http://169.254.169.254/latest/meta-data",
        "a redirect to a number": f"{here}/to/http://2130706434/",
        "a redirect to IPv6": f"{here}/to/http://[::1]:{host}/a.png",
        "a redirect to a file": f"{here}/to/file:///etc/passwd",
        "redirects without an end": f"{here}/to/" * 5 + f"{here}/a.png",
        "a body without an end": f"{here}/endless",
        "a slow body": f"{here}/slow",
        "no such image": f"{here}/status/404",
        "a server's error": f"{here}/status/500",
        "no image": f"{here}/a.png",
        "a port where nobody listens": "http://127.0.0.1:1/a.png",
    }
    assert len(urls) >= 120
    machine = MachineShare()
    for content in (large(), PNG, *ODD.values()):  # each reader has read some, so that what stays is there before
        assert server.post("/v1/chat/completions", chat(data_url(content))).status_code == 200
    before, children = resident(server), server.children()
    stream = Stream(server.url)
    stream.start()

    def send(name: str) -> tuple[str, int, str]:
        found = server.post("/v1/chat/completions", chat(urls[name].format(media=media)))
        machine.sample()
        return name, found.status_code, found.text

    begun = time.monotonic()
    with ThreadPoolExecutor(6) as senders:
        answers = list(senders.map(send, urls))
        large_ones = [
            senders.submit(server.post, "/v1/chat/completions", chat(data_url(large(s)))) for s in (5999, 5998)
        ]
    assert [each for each in answers if each[1] != 400] == []
    assert [each.result().status_code for each in large_ones] == [200, 200]
    assert server.post("/v1/chat/completions", chat(data_url(file_of(picture(seed=5))))).status_code == 200
    stream.over.set()
    stream.join(60)
    assert not stream.is_alive()
    assert stream.answers
    is_busy = machine.lost(begun, time.monotonic()) > BUSY * (time.monotonic() - begun)
    assert stream.longest(machine) < (BUSY_STALL_S if is_busy else STALL_S)
    assert server.children() == children, server.log
    assert settled(server, before + GROWTH) <= before + GROWTH


def test_an_engine_that_dies_is_followed_by_one_that_sees_the_images_again(served: tuple[QuireServe, Path]) -> None:
    server, _ = served
    parts = [{"type": "image_url", "image_url": {"url": data_url(file_of(picture(seed=seed)))}} for seed in (7, 8)]
    content = [*parts, {"type": "text", "text": "What?"}]
    body = {"model": "tiny", "messages": [{"role": "user", "content": content}], "temperature": 0}
    body |= {"ignore_eos": True, "max_tokens": 1200, "return_token_ids": True}
    expected = server.post("/v1/chat/completions", body).json()["choices"][0]["token_ids"]
    engine, found = server.children()["engine"], list[int]()
    url = f"{server.url}/v1/chat/completions"
    with httpx.stream("POST", url, json={**body, "stream": True}, timeout=120) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line[6:])["choices"]:
                found += choice.get("token_ids") or []
            if len(found) > 20 and engine:
                os.kill(engine, signal.SIGKILL)
                engine = 0
    assert found == expected
    assert not engine
    assert re.search(r"^quire:sequences_replayed_total\S* 1\.0$", httpx.get(server.url + "/metrics").text, re.MULTILINE)
