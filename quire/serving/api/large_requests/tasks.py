"""What an API process asks of its reader processes, and what they answer."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from quire.errors import QuireError, RequestError, UnsupportedField
from quire.foundation.config import Config

TruncationSide = Literal["left", "right"]
_KINDS = {kind.__name__: kind for kind in (RequestError, UnsupportedField)}


class Setup(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The first message: settings, which name the model's files. They may hold keys, so they are no arguments."""

    config: Config


class CheckBody(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Is this what a schema wants?

    Attributes:
        raw: A request's body.
        schema: `module:Class`; empty for any JSON object.
        ignored, unsupported: See FieldLists.
    """

    raw: bytes
    schema: str
    ignored: list[str]
    unsupported: dict[str, list[Any]]


class Encode(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The token ids of a text.

    Attributes:
        kept: How many tokens are wanted, and from which end others are cut off; None for all.
        behind: Not None: the text stands before a gap, and this behind it.
    """

    text: str
    add_special_tokens: bool = True
    kept: tuple[int, TruncationSide] | None = None
    behind: str | None = None


class Decode(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The text of token ids, special tokens included; see `pack`."""

    tokens: bytes


class Render(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The text of a conversation. All but the last are arguments of `ChatTemplate.render`.

    Attributes:
        template: Text of another template than the model's.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    documents: list[dict[str, Any]]
    add_generation_prompt: bool
    continue_final_message: bool
    variables: dict[str, Any]
    template: str | None = None


Task = CheckBody | Encode | Decode | Render


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """What came of a task. The first answer says that the process is ready.

    Attributes:
        text: Of Render and Decode.
        tokens: Of Encode, see `unpack`.
        error: The class of a RequestError, empty for none.
        message, param: Of the error.
    """

    text: str = ""
    tokens: bytes = b""
    error: str = ""
    message: str = ""
    param: str | None = None

    def raise_error(self) -> None:
        """Raise the error that is told of, if one is."""
        if self.error:
            error = RequestError.__new__(_KINDS.get(self.error, RequestError))
            QuireError.__init__(error, self.message, param=self.param)
            raise error


def refusal(error: RequestError) -> Answer:
    """A task's error."""
    return Answer(error=type(error).__name__, message=error.message, param=error.param)


def pack(tokens: Sequence[int]) -> bytes:
    """Token ids as int64: twenty times as fast to read as a list in msgpack."""
    return array("q", tokens).tobytes()


def unpack(packed: bytes) -> list[int]:
    """The ids that `pack` was given."""
    tokens = array("q")
    tokens.frombytes(packed)
    return tokens.tolist()
