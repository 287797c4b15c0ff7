"""Resolving --model, against a loopback hub that serves one tiny repository, one gated and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from quire.errors import ModelNotFoundError
from quire.models.weights import hub
from tests.gguf.bytes import smallest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b'{"a": 1}',
    "model.safetensors": b"weights",
    "tokenizer.json": b"{}",
    "tokenizer.model": b"pieces",
    "chat_template.jinja": b"{{ x }}",
    "merges.txt": b"a b",
    "pytorch_model.bin": b"pickled",
    "original/consolidated.pt": b"pickled",
    "modeling_tiny.py": b"import os",
    "README.md": b"# tiny",
    "tiny-Q8_0.gguf": smallest(),
    "tiny-Q4_K_M.gguf": smallest(),
}
WANTED = {
    "config.json", "model.safetensors", "tokenizer.json", "tokenizer.model", "chat_template.jinja", "merges.txt",
}  # fmt: skip


class Hub(BaseHTTPRequestHandler):
    """The few routes that snapshot_download asks for."""

    requested: list[str]

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def log_message(self, *args: object) -> None:
        pass

    def _answer(self, body: bool) -> None:
        self.server.requested.append(self.path)  # type: ignore[attr-defined]
        token = self.headers.get("Authorization", "")
        if "org/gated" in self.path and token != "Bearer good":
            self._send(403, b"", {"X-Error-Code": "GatedRepo"}, body)
        elif self.path.endswith("/revision/nowhere"):
            self._send(404, b"", {"X-Error-Code": "RevisionNotFound"}, body)
        elif self.path.startswith(("/api/models/org/tiny", "/api/models/org/gated")):
            if "/tree/" in self.path:
                entries = [{"type": "file", "path": n, "size": len(c), "oid": "0" * 40} for n, c in FILES.items()]
                self._send(200, json.dumps(entries).encode(), {}, body)
            else:
                siblings = [{"rfilename": name} for name in FILES]
                info = {"id": "org/tiny", "sha": COMMIT, "siblings": siblings}
                self._send(200, json.dumps(info).encode(), {}, body)
        elif f"/resolve/{COMMIT}/" in self.path:
            content = FILES[self.path.split(f"/resolve/{COMMIT}/")[1]]
            self._send(200, content, {"ETag": f'"{hash(content):x}"', "X-Repo-Commit": COMMIT}, body)
        else:
            self._send(404, b"", {"X-Error-Code": "RepoNotFound"}, body)

    def _send(self, status: int, content: bytes, headers: dict[str, str], body: bool) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(content))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)


@pytest.fixture
def endpoint() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.requested = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def resolve(url: str, cache: Path, *arguments: object, **environment: str) -> tuple[str, str]:
    """(path, error) of `hub.resolve(*arguments)` in a process of its own: huggingface_hub reads HF_ENDPOINT once."""
    code = (
        "import json, sys\n"
        "from quire.errors import ModelNotFoundError\n"
        "from quire.models.weights.hub import resolve\n"
        "try: print(json.dumps([str(resolve(*json.loads(sys.argv[1]))), '']))\n"
        "except ModelNotFoundError as error: print(json.dumps(['', error.message]))\n"
        "assert 'torch' not in sys.modules\n"
    )
    mine = {"HF_ENDPOINT": url, "HF_HOME": str(cache / "home"), "HF_HUB_DISABLE_XET": "1"}
    clean = {
        k: v for k, v in os.environ.items() if "proxy" not in k.lower() and not k.startswith(("HF_", "TRANSFORMERS_"))
    }
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(arguments)],
        env=clean | mine | environment, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    path, error = json.loads(done.stdout.strip().splitlines()[-1])
    return path, error


def url_of(server: ThreadingHTTPServer) -> str:
    return f"http://127.0.0.1:{server.server_port}"


def test_only_what_serving_needs_is_fetched(endpoint: ThreadingHTTPServer, tmp_path: Path) -> None:
    path, error = resolve(url_of(endpoint), tmp_path, "org/tiny", None, None, str(tmp_path / "here"))
    assert error == ""
    assert path.startswith(str(tmp_path / "here"))
    found = {p.relative_to(path).as_posix() for p in Path(path).rglob("*") if p.is_file()}
    assert found == WANTED
    assert all((Path(path) / name).read_bytes() == FILES[name] for name in WANTED)
    assert not [p for p in endpoint.requested if p.endswith((".bin", ".pt", ".py", ".md"))]  # type: ignore[attr-defined]
    # The second time, without a network, the cache serves.
    again, error = resolve("http://127.0.0.1:9", tmp_path, "org/tiny", None, None, str(tmp_path / "here"))
    assert (again, error) == (path, "")


def test_one_gguf_file_of_a_repository(endpoint: ThreadingHTTPServer, tmp_path: Path) -> None:
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    before = len(endpoint.requested)  # type: ignore[attr-defined]
    path, error = resolve(url_of(endpoint), tmp_path, "org/tiny:q8_0", **cache)
    assert error == ""
    assert {p.name for p in Path(path).glob("*.gguf")} == {"tiny-Q8_0.gguf"}
    assert not [p for p in endpoint.requested[before:] if "Q4_K_M" in p or "safetensors" in p]  # type: ignore[attr-defined]
    again, error = resolve("http://127.0.0.1:9", tmp_path, "org/tiny:Q8_0", **cache)
    assert (again, error) == (path, "")
    _, error = resolve(url_of(endpoint), tmp_path, "org/tiny:Q2_K", **cache)
    assert "none of them with 'Q2_K'" in error


def test_gated_repository(endpoint: ThreadingHTTPServer, tmp_path: Path) -> None:
    _, error = resolve(url_of(endpoint), tmp_path, "org/gated")
    assert "'org/gated' is gated" in error
    assert "--hf-token" in error
    path, error = resolve(url_of(endpoint), tmp_path, "org/gated", None, "good")
    assert error == ""
    assert (Path(path) / "config.json").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("org/nothing",), ("'org/nothing' is neither a directory", "check its name")),
        (("org/tiny", "nowhere"), ("has no revision 'nowhere'", "--revision")),
        (("./not/there",), ("'./not/there' is neither a directory nor a hub id", "--model")),
    ],
)
def test_what_is_not_there(
    arguments: tuple[str, ...], words: tuple[str, ...], endpoint: ThreadingHTTPServer, tmp_path: Path
) -> None:
    _, error = resolve(url_of(endpoint), tmp_path, *arguments)
    assert all(w in error for w in words), error


@pytest.mark.parametrize(
    ("environment", "why"),
    [
        ({}, "the hub cannot be reached: connect"),
        ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set, so the hub is not asked: unset it"),
        ({"TRANSFORMERS_OFFLINE": "1"}, "TRANSFORMERS_OFFLINE is set, so the hub is not asked: unset it"),
    ],
)
def test_offline(environment: dict[str, str], why: str, tmp_path: Path) -> None:
    _, error = resolve("http://127.0.0.1:9", tmp_path, "org/tiny", **environment)
    assert why in error, error
    assert "give a directory" in error


def test_directories_are_taken_as_they_are(tmp_path: Path) -> None:
    assert hub.resolve(str(tmp_path)) == tmp_path
    (tmp_path / "file.bin").write_text("")
    with pytest.raises(ModelNotFoundError, match="is a file"):
        hub.resolve(str(tmp_path / "file.bin"))


def test_a_name_that_no_file_can_have() -> None:
    with pytest.raises(ModelNotFoundError, match=r"--model xxx.* cannot be looked for: file name too long"):
        hub.resolve(300 * "x")
