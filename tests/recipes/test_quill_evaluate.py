"""``evaluate.py`` against a server that knows the references."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from quill.examination import examination

SCRIPT = Path(__file__).parents[2] / "recipes" / "quill" / "evaluate.py"
QUESTIONS = 28


class _Oracle(BaseHTTPRequestHandler):
    """Answers each question with its reference, but the first with nonsense."""

    references: ClassVar[dict[str, str]] = {
        json.dumps([[m.role, m.content] for m in sample.question]): sample.answer if number else "nonsense"
        for number, sample in enumerate(examination(QUESTIONS))
    }

    def do_GET(self) -> None:
        self._reply({"data": [{"id": "oracle"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["model"] == "oracle"
        assert body["temperature"] == 0
        answer = self.references[json.dumps([[m["role"], m["content"]] for m in body["messages"]])]
        self._reply({"choices": [{"message": {"role": "assistant", "content": answer}}]})

    def _reply(self, content: object) -> None:
        payload = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


class _Server(ThreadingHTTPServer):
    request_queue_size = 64  # the default of 5 resets connections when many come at once


@pytest.fixture
def base_url() -> Iterator[str]:
    server = _Server(("127.0.0.1", 0), _Oracle)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    thread.join()
    server.server_close()


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_scores_a_server(base_url: str, tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    done = _run("--base-url", base_url, "--questions", str(QUESTIONS), "--json", str(result))
    assert done.returncode == 0, done.stderr
    assert "overall" in done.stdout
    written = json.loads(result.read_text())
    assert written["scores"]["overall"] == {"right": 27, "asked": 28, "percent": 96.43}
    assert [wrong["said"] for wrong in written["wrong"]] == ["nonsense"]


def test_a_server_that_is_not_there_is_named() -> None:
    done = _run("--base-url", "http://127.0.0.1:9/v1", "--questions", "1")
    assert done.returncode == 1
    assert "http://127.0.0.1:9/v1 did not answer" in done.stderr
