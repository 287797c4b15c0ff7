"""`quire chat` and `quire complete`: a running server answers, or continues, what is typed in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Annotated

import tyro

from quire.cli.flags import parse
from quire.cli.remote import RemoteServer, is_typed, printable, typed_lines
from quire.errors import QuireError

CHAT_DESCRIPTION = "Chat with a running server. Ctrl-C stops an answer; Ctrl-D leaves."
COMPLETE_DESCRIPTION = "Let a running server go on with a text. Ctrl-C stops it; Ctrl-D leaves."
Messages = list[dict[str, str]]


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
