"""`quire chat` and `quire complete`: a running server answers, or continues, what is typed in the terminal.

Control characters of answers do not reach the terminal.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import tyro

from quire.cli.flags import parse
from quire.errors import ConfigError, QuireError, UnavailableError, reason
from quire.foundation.config import environment
from quire.foundation.http_client.http1 import ConnectError, HttpError
from quire.foundation.http_client.pool import BlockingClient

CHAT_DESCRIPTION = "Chat with a running server. Ctrl-C stops an answer; Ctrl-D leaves."
COMPLETE_DESCRIPTION = "Let a running server go on with a text. Ctrl-C stops it; Ctrl-D leaves."
Messages = list[dict[str, str]]
CONNECT_S = 10.0
PROMPT = "> "
_CONTROLS = dict.fromkeys(code for code in [*range(32), *range(127, 160)] if chr(code) not in "\n\t")


@dataclass(frozen=True)
class ChatOptions:
    """Which server and model to chat with."""

    url: str = "http://localhost:8000/v1"
    """Address of the server's OpenAI API."""
    model_name: str | None = None
    """Name of the model. Default: the first one that the server serves."""
    api_key: str | None = None
    """API key, if the server asks for one. Default: the variable QUIRE_API_KEY."""
    system_prompt: str | None = None
    """What the model is told before the conversation."""
    quick: Annotated[str | None, tyro.conf.arg(aliases=["-q"], metavar="TEXT")] = None
    """Send this one message, print the answer and leave."""


def chat(arguments: Sequence[str]) -> int:
    """Chat until the user leaves; returns the exit code. Raises QuireError if the server is not there, or refuses."""
    options = parse(ChatOptions, arguments, "quire chat", CHAT_DESCRIPTION)
    with RemoteServer(options.url, options.api_key) as server:
        model = options.model_name or server.model()
        messages: Messages = []
        if options.system_prompt is not None:
            messages.append({"role": "system", "content": options.system_prompt})
        if options.quick is not None:
            _answer(server, model, [*messages, {"role": "user", "content": options.quick}])
            return 0
        if is_typed():
            print(f"Chatting with {printable(model)}. Ctrl-C stops an answer; Ctrl-D leaves.")
        for line in map(str.strip, typed_lines()):
            if line:
                _turn(server, model, messages, line)
    return 0


def _turn(server: RemoteServer, model: str, messages: Messages, line: str) -> None:
    """Ask one question and print the answer. A question that failed does not stay in the conversation."""
    messages.append({"role": "user", "content": line})
    try:
        messages.append({"role": "assistant", "content": _answer(server, model, messages)})
    except QuireError as error:
        print(f"quire: error: {error.message}", file=sys.stderr)
        messages.pop()


def _answer(server: RemoteServer, model: str, messages: Messages) -> str:
    """Print an answer while it comes. Returns its text, up to its end or Ctrl-C."""
    texts: list[str] = []
    with closing(server.stream("/chat/completions", {"model": model, "messages": messages})) as choices:
        with suppress(KeyboardInterrupt):
            for choice in choices:
                text = choice["delta"].get("content") or ""
                texts.append(text)
                print(printable(text), end="", flush=True)
        print()
    return "".join(texts)


@dataclass(frozen=True)
class CompleteOptions:
    """Which server and model to ask, and for how much."""

    url: str = "http://localhost:8000/v1"
    """Address of the server's OpenAI API."""
    model_name: str | None = None
    """Name of the model. Default: the first one that the server serves."""
    api_key: str | None = None
    """API key, if the server asks for one. Default: the variable QUIRE_API_KEY."""
    max_tokens: int = 128
    """Longest completion, in tokens."""
    quick: Annotated[str | None, tyro.conf.arg(aliases=["-q"], metavar="TEXT")] = None
    """Complete this one text and leave."""


def complete(arguments: Sequence[str]) -> int:
    """Complete texts until the user leaves; returns the exit code. Raises QuireError if the server is gone or
    refuses."""
    options = parse(CompleteOptions, arguments, "quire complete", COMPLETE_DESCRIPTION)
    with RemoteServer(options.url, options.api_key) as server:
        model = options.model_name or server.model()
        if options.quick is not None:
            _complete(server, model, options.quick, options.max_tokens)
            return 0
        for text in filter(None, typed_lines()):
            _complete(server, model, text, options.max_tokens)
    return 0


def _complete(server: RemoteServer, model: str, text: str, max_tokens: int) -> None:
    body = {"model": model, "prompt": text, "max_tokens": max_tokens}
    with closing(server.stream("/completions", body)) as choices:
        with suppress(KeyboardInterrupt):
            for choice in choices:
                print(printable(choice["text"]), end="", flush=True)
        print()


class RemoteServer:
    """One server's OpenAI API, as a context. A URL without a path gets /v1, and the default key is that of the variable
    QUIRE_API_KEY. Raises ConfigError if the URL or the key cannot be used."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self._url = url.rstrip("/")
        if self._url.count("/") == 2:
            self._url += "/v1"
        api_key = api_key or environment.api_key()
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        try:
            self._http = BlockingClient(self._url, headers, connect_s=CONNECT_S)
        except ValueError as error:
            raise ConfigError(f"{self._url} cannot be asked: {error}.", param="url") from error

    def __enter__(self) -> RemoteServer:
        return self

    def __exit__(self, *error: object) -> None:
        self._http.__exit__(*error)

    def model(self) -> str:
        """The name of the first served model. Raises QuireError if the server does not answer with a list of models."""
        content = b"".join(self._sent("GET", "/models", None))
        try:
            return str(msgspec.json.decode(content)["data"][0]["id"])
        except (msgspec.DecodeError, LookupError, TypeError) as error:
            raise QuireError(f"{self._url} does not answer as an OpenAI server: check --url.") from error

    def stream(self, path: str, body: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
        """The choices of a streamed answer, as they come. Ending the iteration early ends the work on the server.
        Raises QuireError if the server refuses, fails, or is not there."""
        unread = b""
        with closing(self._sent("POST", path, {**body, "stream": True})) as parts:
            for part in parts:
                *lines, unread = (unread + part).split(b"\n")
                for line in map(bytes.strip, lines):
                    if not line.startswith(b"data: ") or line == b"data: [DONE]":
                        continue
                    event = msgspec.json.decode(line.removeprefix(b"data: "))
                    if "error" in event:
                        raise QuireError(event["error"]["message"])
                    yield from event["choices"]

    def _sent(self, method: str, path: str, body: dict[str, Any] | None) -> Generator[bytes, None, None]:
        """The body of an answer without an error, in parts, as they come. Closing it ends the request."""
        try:
            status, parts = self._http.stream(method, path, body)
            if status == 200:
                return _whole_or_unavailable(parts)
            message = _message(status, b"".join(parts))
        except ConnectError as error:
            raise UnavailableError(f"No server listens at {self._url}. Start one with: quire serve") from error
        except HttpError as error:
            raise UnavailableError(f"{self._url} cannot be asked: {reason(error)}.") from error
        if status == 401:
            raise QuireError("The server wants another API key: give it by --api-key or in QUIRE_API_KEY.")
        raise QuireError(message)


def is_typed() -> bool:
    """Whether somebody types at a terminal, and so wants to be prompted."""
    return sys.stdin.isatty()


def typed_lines() -> Iterator[str]:
    """Lines until Ctrl-D, Ctrl-C or the end of the pipe. Prompts and a last line break are for people only."""
    typed = is_typed()
    if typed:
        with suppress(ImportError):
            import readline  # noqa: F401  (gives input() history and editing)
    with suppress(EOFError, KeyboardInterrupt):
        while True:
            yield input(PROMPT if typed else "")
    if typed:
        print()


def printable(text: str) -> str:
    """Text without control characters, by which it could control the terminal."""
    return text.translate(_CONTROLS)


def _whole_or_unavailable(parts: Generator[bytes, None, None]) -> Generator[bytes, None, None]:
    with closing(parts):
        try:
            yield from parts
        except HttpError as error:
            raise UnavailableError("The server went away in the middle of its answer.") from error


def _message(status: int, content: bytes) -> str:
    try:
        return str(msgspec.json.decode(content)["error"]["message"])
    except (msgspec.DecodeError, LookupError, TypeError):
        return f"The server answered {status} without saying why: check --url."
