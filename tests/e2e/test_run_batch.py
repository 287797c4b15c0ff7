"""`quire run-batch` as users start it, with the built-in model: interrupted, and run again."""

from __future__ import annotations

import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

COUNT = 120


def command(*arguments: str, at_once: int = 4) -> list[str]:
    return [sys.executable, "-m", "quire.cli.main", "run-batch", *arguments, "--max-num-seqs", str(at_once)]


def request(number: int) -> dict[str, Any]:
    question = "What is the capital of France?"
    match number % 3:
        case 0:
            url, body = "/v1/chat/completions", {"messages": [{"role": "user", "content": question}], "max_tokens": 8}
        case 1:
            url, body = "/v1/completions", {"prompt": question, "max_tokens": 8}
        case _:
            url, body = "/v1/responses", {"input": question, "max_output_tokens": 8}
    return {"custom_id": f"request {number}", "method": "POST", "url": url, "body": body | {"temperature": 0}}


@pytest.mark.long("api")
def test_an_interrupted_batch_goes_on(tmp_path: Path) -> None:
    source, target, partial = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
    source.write_text("\n".join(json.dumps(request(i)) for i in range(COUNT)))
    slow = command("-i", str(source), "-o", str(target), at_once=1)  # not done before the interrupt
    first = subprocess.Popen(slow, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 180
    while not partial.exists() or partial.read_bytes().count(b"\n") < 5:
        assert first.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=120)
    assert first.returncode == 130
    kept = partial.read_bytes().count(b"\n")
    assert not target.exists()
    second = subprocess.run(command("-i", str(source), "-o", str(target)), capture_output=True, text=True, timeout=240)
    assert second.returncode == 0, second.stderr
    assert f"{kept} of {COUNT} requests were answered before" in second.stderr
    assert f"{COUNT} requests answered, 0 of them with an error" in second.stderr
    answers = [json.loads(line) for line in target.read_text().splitlines()]
    assert [answer["custom_id"] for answer in answers] == [f"request {i}" for i in range(COUNT)]
    assert {answer["response"]["body"]["object"] for answer in answers} == {
        "chat.completion", "text_completion", "response",
    }  # fmt: skip
    chats = {answer["response"]["body"]["choices"][0]["message"]["content"] for answer in answers[::3]}
    items = {answer["response"]["body"]["output"][0]["content"][0]["text"] for answer in answers[2::3]}
    assert chats == items
    assert len(chats) == 1
    assert "Paris" in next(iter(chats))
    assert not partial.exists()


class Files(http.server.BaseHTTPRequestHandler):
    """GET gives the input, PUT takes the output."""

    given: bytes
    taken: list[bytes]

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.given)

    def do_PUT(self) -> None:
        if "Content-Length" in self.headers:
            self.taken.append(self.rfile.read(int(self.headers["Content-Length"])))
        else:
            self.taken.append(b"")
            while size := int(self.rfile.readline(), 16):
                self.taken[-1] += self.rfile.read(size + 2)[:-2]
            self.rfile.readline()
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def files() -> Iterator[str]:
    Files.given, Files.taken = "\n".join(json.dumps(request(i)) for i in range(4)).encode(), []
    with http.server.HTTPServer(("127.0.0.1", 0), Files) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.mark.long("api")
def test_input_and_output_may_be_addresses(files: str, tmp_path: Path) -> None:
    addresses = ("-i", f"{files}/in", "-o", f"{files}/out", "--output-tmp-dir", str(tmp_path))
    done = subprocess.run(command(*addresses), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    (taken,) = Files.taken
    assert [json.loads(line)["custom_id"] for line in taken.splitlines()] == [f"request {i}" for i in range(4)]
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("-o", "x"), "--input-file is needed"),
        (("-i", "x"), "--output-file is needed"),
        (("-i", "nothing", "-o", "x"), "there is no file nothing"),
        (("-i", __file__, "-o", "x"), "line 1: This line is not a JSON object"),
    ],
)
def test_what_cannot_run_is_said_at_once(arguments: tuple[str, ...], words: str) -> None:
    done = subprocess.run(command(*arguments), capture_output=True, text=True, timeout=240)
    assert done.returncode in (1, 2)
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
