"""A running server, as `quire chat` and `quire complete` see it.

Owns the connection and what is said when something is wrong with it. Knows nothing about terminals but that control
characters from a model do not belong there.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from types import TracebackType
from typing import Any

import httpx
import msgspec

from quire.errors import QuireError, UnavailableError, reason
from quire.foundation.config import environment

CONNECT_S = 10.0
_CONTROLS = dict.fromkeys(code for code in [*range(32), *range(127, 160)] if chr(code) not in "\n\t")


class RemoteServer:
    """One server's OpenAI API. Use as a context manager."""

    def __init__(self, url: str, api_key: str | None) -> None:
        """
        Args:
            url: Up to and including /v1, which is added if there is no path.
            api_key: If the server asks for one. Default: the variable QUIRE_API_KEY.
        """
        self._url = url.rstrip("/")
        if self._url.count("/") == 2:
            self._url += "/v1"
        api_key = api_key or environment.api_key()
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.Client(headers=headers, timeout=httpx.Timeout(None, connect=CONNECT_S))

    def __enter__(self) -> RemoteServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def model(self) -> str:
        """The name of the first model that is served.

        Raises:
            QuireError: The server does not answer, or not with a list of models.
        """
        with closing(self._sent("GET", "/models", None)) as answer:
            answer.read()
            try:
                return str(msgspec.json.decode(answer.content)["data"][0]["id"])
            except (msgspec.DecodeError, LookupError, TypeError) as error:
                raise QuireError(f"{self._url} does not answer as an OpenAI server: check --url.") from error

    def stream(self, path: str, body: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
        """The choices of a streamed answer, as they come. Leaving the iteration ends the work on the server.

        Raises:
            QuireError: The server refuses, fails, or is not there.
        """
        with closing(self._sent("POST", path, {**body, "stream": True})) as answer:
            try:
                for line in answer.iter_lines():
                    if not line.startswith("data: ") or line == "data: [DONE]":
                        continue
                    event = msgspec.json.decode(line.removeprefix("data: "))
                    if "error" in event:
                        raise QuireError(event["error"]["message"])
                    yield from event["choices"]
            except httpx.TransportError as error:
                raise UnavailableError("The server went away in the middle of its answer.") from error

    def _sent(self, method: str, path: str, body: dict[str, Any] | None) -> httpx.Response:
        """A response whose body is not read yet; closing it ends the request."""
        request = self._http.build_request(method, self._url + path, json=body)
        try:
            answer = self._http.send(request, stream=True)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise UnavailableError(f"No server listens at {self._url}. Start one with: quire serve") from error
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise UnavailableError(f"{self._url} cannot be asked: {reason(error)}.") from error
        if answer.status_code != httpx.codes.OK:
            answer.read()
            answer.close()
            if answer.status_code == httpx.codes.UNAUTHORIZED:
                raise QuireError("The server wants another API key: give it by --api-key or in QUIRE_API_KEY.")
            raise QuireError(_message(answer))
        return answer


def printable(text: str) -> str:
    """Text without control characters, which could do more to a terminal than print."""
    return text.translate(_CONTROLS)


def _message(answer: httpx.Response) -> str:
    try:
        return str(msgspec.json.decode(answer.content)["error"]["message"])
    except (msgspec.DecodeError, LookupError, TypeError):
        return f"The server answered {answer.status_code} without saying why: check --url."
