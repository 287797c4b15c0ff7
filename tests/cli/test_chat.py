"""`quire chat` and `quire complete` against a running server."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from quire.cli import chat
from quire.cli.chat import printable
from quire.errors import ConfigError, QuireError, UnavailableError
from tests.api.server import KEY, Pace, Server, running


@pytest.fixture(scope="module")
def pace() -> Pace:
    """The model's, which is fast."""
    pace = Pace()
    pace.hurry()
    return pace


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, pace: Pace) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("model"), api_key=(KEY,), sample=pace) as server:
        yield server


def flags(server: Server, *more: str) -> list[str]:
    return [f"--url={server.url}/v1", f"--api-key={KEY}", *more]


def test_a_quick_completion(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert chat.complete(flags(server, "-q", "a", "--max-tokens=5")) == 0
    assert capsys.readouterr().out == "bcdef\n"


def test_a_conversation_remembers(
    server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[list[dict[str, str]]] = []
    stream = chat.RemoteServer.stream

    def watched(self: chat.RemoteServer, path: str, body: dict[str, object]) -> object:
        sent.append(list(body["messages"]))  # type: ignore[call-overload]
        return stream(self, path, body | {"max_tokens": 3})

    lines = iter(["hello", "", "again"])

    def typed(prompt: str) -> str:
        assert prompt == "> "
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr(chat.RemoteServer, "stream", watched)
    monkeypatch.setattr("builtins.input", typed)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    assert chat.chat(flags(server, "--system-prompt", "be brief", "--model-name=alias")) == 0
    assert "Chatting with alias" in capsys.readouterr().out
    assert [message["role"] for message in sent[1]] == ["system", "user", "assistant", "user"]
    assert len(sent[1][2]["content"]) == 3


@pytest.mark.parametrize(("command", "lines"), [("complete", "a\n\na\n"), ("chat", "\na\n")])
def test_a_pipe_gets_answers_and_no_prompts(server: Server, command: str, lines: str) -> None:
    limit = ["--max-tokens=5"] if command == "complete" else []
    done = subprocess.run(
        [sys.executable, "-m", "quire.cli.main", command, *flags(server, *limit)],
        input=lines, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    if command == "complete":
        assert done.stdout == "bcdef\n" * 2
    else:
        assert len(done.stdout) > 100
        assert not done.stdout.startswith((">", "Chatting"))
        assert done.stdout.endswith("\n")
        assert not done.stdout.endswith("\n\n")


def test_commands_change_the_conversation(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[dict[str, Any]] = []

    def stream(self: chat.RemoteServer, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        sent.append(body)
        yield {"delta": {"content": "yes"}}

    lines = iter(["one", "/system be kind", "two", "/clear", "/help", "/etc is a directory?", "/system", "four"])
    monkeypatch.setattr(chat.RemoteServer, "stream", stream)
    monkeypatch.setattr(chat, "typed_lines", lambda: lines)
    assert chat.chat(flags(server, "--temperature", "0.5", "--max-tokens=7", "--system-prompt", "be brief")) == 0
    assert [(body["temperature"], body["max_tokens"]) for body in sent] == [(0.5, 7)] * 4
    told = [[message["content"] for message in body["messages"]] for body in sent]
    assert told == [
        ["be brief", "one"],
        ["be kind", "one", "yes", "two"],
        ["be kind", "/etc is a directory?"],
        ["/etc is a directory?", "yes", "four"],
    ]


def test_ctrl_c_at_the_prompt_drops_the_line_and_twice_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = iter([KeyboardInterrupt, "a", KeyboardInterrupt, KeyboardInterrupt, "b"])

    def next_line(prompt: str) -> str:
        line = next(typed)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", next_line)
    monkeypatch.setattr(chat, "is_typed", lambda: True)
    assert list(chat.typed_lines()) == ["a"]


@pytest.mark.parametrize("command", [chat.chat, chat.complete])
def test_the_address_has_the_flags_of_bench(command: Callable[[Sequence[str]], int], server: Server) -> None:
    host, _, port = server.url.removeprefix("http://").partition(":")
    for address in ([f"--host={host}", f"--port={port}"], ["--base-url", server.url], [f"--base_url={server.url}/v1"]):
        assert command([*address, "--api-key", KEY, "--model=alias", "--temperature=0", "-q", "a"]) == 0
    with pytest.raises(ConfigError, match="--quick is empty"):
        command(["-q", " "])


def test_no_server_is_said_plainly() -> None:
    with pytest.raises(
        UnavailableError, match=r"No server listens at http://127.0.0.1:9/v1. Start one with: quire serve"
    ):
        chat.chat(["--url=http://127.0.0.1:9/v1", "-q", "hi"])


def test_what_the_server_refuses_is_passed_on(server: Server) -> None:
    with pytest.raises(QuireError, match="The server wants another API key"):
        chat.complete([f"--url={server.url}/v1", "-q", "hi"])
    with pytest.raises(QuireError, match="not served here"):
        chat.chat(flags(server, "--model-name=other", "-q", "hi"))
    with pytest.raises(QuireError, match="max_tokens must be at least 1"):
        chat.complete(flags(server, "--max-tokens=0", "-q", "a"))


def test_something_else_listens_there(server: Server) -> None:
    with pytest.raises(QuireError):
        chat.chat([f"--url={server.url}/elsewhere", f"--api-key={KEY}", "-q", "hi"])


def test_an_address_without_a_path_gets_the_usual_one(server: Server) -> None:
    assert chat.chat([f"--url={server.url}", f"--api-key={KEY}", "-q", "hi"]) == 0


def test_ctrl_c_stops_the_answer_on_the_server_too(server: Server, pace: Pace) -> None:
    pace.slow()
    controller, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "quire.cli.main", "chat", *flags(server, "-q", "go on")],
        stdin=terminal, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.read(20)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0
    os.close(terminal)
    os.close(controller)
    deadline = time.monotonic() + 60
    while server.session.num_sequences and time.monotonic() < deadline:
        time.sleep(0.01)
    pace.hurry()
    assert server.session.num_sequences == 0
    assert server.session.stats.engines[0].ended["abort"] >= 1


def test_control_characters_do_not_reach_the_terminal() -> None:
    assert printable("a\x1b[2Jb\x9b\n\tc\r\x07") == "a[2Jb\n\tc"


@pytest.mark.parametrize("command", [chat.chat, chat.complete])
def test_the_key_may_stand_in_the_environment(
    command: Callable[[Sequence[str]], int],
    server: Server,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments = [f"--url={server.url}/v1", "-q", "a"]
    with pytest.raises(QuireError, match=r"give it by --api-key or in QUIRE_API_KEY"):
        command(arguments)
    monkeypatch.setenv("QUIRE_API_KEY", KEY)
    assert command(arguments) == 0
    assert capsys.readouterr().out
