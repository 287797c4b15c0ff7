"""`quire complete`: a running server continues the text that is typed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Annotated

import tyro

from quire.cli.flags import parse
from quire.cli.remote import RemoteServer, printable, typed_lines

DESCRIPTION = "Let a running server go on with a text. Ctrl-C stops it; Ctrl-D leaves."


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


def run(arguments: Sequence[str]) -> int:
    """Complete texts until the user leaves; returns the exit code.

    Raises:
        QuireError: The server is not there, or refuses.
    """
    options = parse(CompleteOptions, arguments, "quire complete", DESCRIPTION)
    with RemoteServer(options.url, options.api_key) as server:
        model = options.model_name or server.model()
        if options.quick is not None:
            _complete(server, model, options.quick, options.max_tokens)
            return 0
        for text in filter(None, typed_lines()):
            _complete(server, model, text, options.max_tokens)
    return 0


def _complete(server: RemoteServer, model: str, text: str, max_tokens: int) -> None:
    """Print the continuation of a text while it comes."""
    body = {"model": model, "prompt": text, "max_tokens": max_tokens}
    with closing(server.stream("/completions", body)) as choices:
        with suppress(KeyboardInterrupt):
            for choice in choices:
                print(printable(choice["text"]), end="", flush=True)
        print()
