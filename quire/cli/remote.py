"""A running server, as `quire chat` and `quire complete` see it, and the lines that are typed for it.

Control characters do not reach the terminal.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator
from contextlib import closing, suppress
from typing import Any

import msgspec

from quire.errors import ConfigError, QuireError, UnavailableError, reason
from quire.foundation.config import environment
from quire.foundation.http_client.http1 import ConnectError, HttpError
from quire.foundation.http_client.pool import BlockingClient

CONNECT_S = 10.0
PROMPT = "> "
_CONTROLS = dict.fromkeys(code for code in [*range(32), *range(127, 160)] if chr(code) not in "\n\t")


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
