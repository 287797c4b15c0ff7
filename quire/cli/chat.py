"""`quire chat` and `quire complete`: a running server answers, or continues, what is typed in the terminal.

Control characters of answers do not reach the terminal.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
import tyro

from quire.cli.flags import parse
from quire.errors import ConfigError, QuireError, UnavailableError, reason
from quire.foundation.config import environment
from quire.foundation.http_client.http1 import ConnectError, HttpError
from quire.foundation.http_client.pool import BlockingClient

CHAT_DESCRIPTION = "Chat with a running server. Ctrl-C stops an answer; /help lists commands; Ctrl-D leaves."
COMPLETE_DESCRIPTION = "Let a running server go on with a text. Ctrl-C stops it; Ctrl-D leaves."
COMMANDS = {
    "/clear": "forget the conversation",
    "/system": "with a text: what the model is told first; without: nothing",
    "/help": "show these commands",
}
CONNECT_S = 10.0
PROMPT = "> "
_CONTROLS = dict.fromkeys(code for code in [*range(32), *range(127, 160)] if chr(code) not in "\n\t")


@dataclass(frozen=True)
class ServerAddress:
    """The server and its model. The flags are those of `quire bench serve`, and vLLM's."""

    base_url: Annotated[str | None, tyro.conf.arg(aliases=["--url"], metavar="URL")] = None
    """Address of the server, with or without /v1. Default: http://HOST:PORT."""
    host: str = "localhost"
    """Host of the server, where --base-url is not given."""
    port: int = 8000
    """Port of the server, where --base-url is not given."""
    model_name: Annotated[str | None, tyro.conf.arg(aliases=["--model"], metavar="NAME")] = None
    """Name of the model. Default: the first one that the server serves."""
    api_key: str | None = None
    """API key, if the server asks for one. Default: the variable QUIRE_API_KEY."""

    def connect(self) -> RemoteServer:
        """The server. Raises ConfigError if the address or the key cannot be used."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return RemoteServer(self.base_url or f"http://{host}:{self.port}", self.api_key)


@dataclass(frozen=True)
class SamplingOptions:
    """How answers are sampled."""

    temperature: float | None = None
    """0 always takes the likeliest token. Default: the model's."""
    max_tokens: int | None = None
    """Longest answer, in tokens. Default: all that the context leaves; 128 to complete a text."""

    def body(self) -> dict[str, Any]:
        """The fields of a request."""
        asked = {"temperature": self.temperature, "max_tokens": self.max_tokens}
        return {name: value for name, value in asked.items() if value is not None}


@dataclass(frozen=True)
class ChatOptions:
    """Which server and model to chat with."""

    system_prompt: str | None = None
    """What the model is told before the conversation."""
    quick: Annotated[str | None, tyro.conf.arg(aliases=["-q"], metavar="TEXT")] = None
    """Send this one message, print the answer and leave."""
    server: ServerAddress = field(default_factory=ServerAddress)
    sampling: SamplingOptions = field(default_factory=SamplingOptions)


class Conversation:
    """A conversation with a model of a server."""

    def __init__(self, server: RemoteServer, body: dict[str, Any], system_prompt: str | None) -> None:
        self._server = server
        self._body = body
        self._system = system_prompt
        self._turns: list[dict[str, str]] = []

    def enter(self, line: str) -> None:
        """Do what a line asks for: a command, or a question."""
        command, _, text = line.partition(" ")
        if command not in COMMANDS:
            self._ask(line)
        elif command == "/clear":
            self._turns.clear()
        elif command == "/system":
            self._system = text.strip() or None
        else:
            print("\n".join(f"{name:<8} {what}" for name, what in COMMANDS.items()))

    def answer(self, question: str) -> str:
        """Print the answer to a question while it comes. Returns its text, up to its end or Ctrl-C."""
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        messages = [*system, *self._turns, {"role": "user", "content": question}]
        texts: list[str] = []
        with closing(self._server.stream("/chat/completions", {**self._body, "messages": messages})) as choices:
            with suppress(KeyboardInterrupt):
                for choice in choices:
                    text = choice["delta"].get("content") or ""
                    texts.append(text)
                    print(printable(text), end="", flush=True)
            print()
        return "".join(texts)

    def _ask(self, question: str) -> None:
        """Print the answer to a question, and keep both. A question that failed does not stay in the conversation."""
        try:
            answer = self.answer(question)
        except QuireError as error:
            print(f"quire: error: {error.message}", file=sys.stderr)
            return
        self._turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def chat(arguments: Sequence[str]) -> int:
    """Chat until the user leaves; returns the exit code. Raises QuireError if the server is not there, or refuses."""
    options = parse(ChatOptions, arguments, "quire chat", CHAT_DESCRIPTION)
    _check_quick(options.quick)
    with options.server.connect() as server:
        model = options.server.model_name or server.model()
        conversation = Conversation(server, {"model": model, **options.sampling.body()}, options.system_prompt)
        if options.quick is not None:
            conversation.answer(options.quick)
            return 0
        if is_typed():
            print(
                f"Chatting with {printable(model)}. Ctrl-C stops an answer; /clear forgets the conversation; /help; "
                "Ctrl-D leaves."
            )
        for line in map(str.strip, typed_lines()):
            if line:
                conversation.enter(line)
    return 0


@dataclass(frozen=True)
class CompleteOptions:
    """Which server and model to ask, and for how much."""

    quick: Annotated[str | None, tyro.conf.arg(aliases=["-q"], metavar="TEXT")] = None
    """Complete this one text and leave."""
    server: ServerAddress = field(default_factory=ServerAddress)
    sampling: SamplingOptions = field(default_factory=SamplingOptions)


def complete(arguments: Sequence[str]) -> int:
    """Complete texts until the user leaves; returns the exit code. Raises QuireError if the server is gone or
    refuses."""
    options = parse(CompleteOptions, arguments, "quire complete", COMPLETE_DESCRIPTION)
    _check_quick(options.quick)
    with options.server.connect() as server:
        model = options.server.model_name or server.model()
        body = {"model": model, "max_tokens": 128, **options.sampling.body()}
        for text in [options.quick] if options.quick is not None else filter(None, typed_lines()):
            _complete(server, {**body, "prompt": text})
    return 0


def _complete(server: RemoteServer, body: dict[str, Any]) -> None:
    """Print the continuation of a text while it comes."""
    with closing(server.stream("/completions", body)) as choices:
        with suppress(KeyboardInterrupt):
            for choice in choices:
                print(printable(choice["text"]), end="", flush=True)
        print()


def _check_quick(text: str | None) -> None:
    if text is not None and not text.strip():
        raise ConfigError("--quick is empty: give it a text, or leave it out to type several.", param="quick")


# --- a running server, and the lines that are typed for it ------------------------------------------------------------


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

    @property
    def url(self) -> str:
        """The address that is asked, with its path."""
        return self._url

    def model(self) -> str:
        """The name of the first served model. Raises QuireError if the server does not answer with a list of models."""
        return str(self.card(None)["id"])

    def card(self, name: str | None) -> dict[str, Any]:
        """What the server says about a model, by default the first one; it has an `id` at least. Raises ConfigError if
        it serves no model of this name, and QuireError if it does not answer with a list of models."""
        content = b"".join(self._sent("GET", "/models", None))
        try:
            cards: dict[str, dict[str, Any]] = {card["id"]: card for card in msgspec.json.decode(content)["data"]}
            found = next(iter(cards.values()), None) if name is None else cards.get(name)
        except (msgspec.DecodeError, LookupError, TypeError) as error:
            raise QuireError(f"{self._url} does not answer as an OpenAI server: check --base-url.") from error
        if found is None:
            served = f" Served: {', '.join(cards)}." if cards else ""
            raise ConfigError(f"The server serves no model '{name}'.{served}", param="model_name")
        return found

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
    """Lines until Ctrl-D, Ctrl-C twice or the end of the pipe. A single Ctrl-C drops what is typed. Prompts and a last
    line break are for people only."""
    typed = is_typed()
    if typed:
        with suppress(ImportError):
            import readline  # noqa: F401  (gives input() history and editing)
    was_interrupted = False
    with suppress(EOFError):
        while True:
            try:
                line = input(PROMPT if typed else "")
            except KeyboardInterrupt:
                if was_interrupted or not typed:
                    break
                was_interrupted = True
                print("\nCtrl-C again or Ctrl-D leaves.")
                continue
            was_interrupted = False
            yield line
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
        return f"The server answered {status} without saying why: check --base-url."
