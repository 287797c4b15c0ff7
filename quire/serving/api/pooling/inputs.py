"""From the texts of a request to the token ids that engines pool. Texts are encoded together, off the event loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from quire.errors import ContextLengthError, RequestError
from quire.foundation.messages.from_engine import PoolingInfo
from quire.serving.api.large_requests.readers import TruncationSide
from quire.serving.api.pooling.schemas import InputFields, PooledFields
from quire.serving.api.request_work import TimeSlice
from quire.serving.api.schemas.completion import Prompt
from quire.serving.api.serving import Serving
from quire.text.pooled_texts import NOTHING_AROUND, Around, as_read, cut, named_prompt, prompt_length


@dataclass(frozen=True)
class PooledText:
    """A text as engines take it.

    Attributes:
        tokens: Token ids.
        token_types: One byte for each token, its type; empty: all are 0.
        skip: How many of the first tokens are not pooled.
    """

    tokens: list[int]
    token_types: bytes = b""
    skip: int = 0

    @property
    def options(self) -> dict[str, Any]:
        """What `EngineSession.add_request` takes as `per_prompt`."""
        return {"token_types": self.token_types, "prompt_skip": self.skip}


@dataclass(frozen=True)
class Cut:
    """How long texts may be.

    Attributes:
        longest: Maximum number of tokens.
        kept: How many tokens are kept, and from which end others are cut off; None: longer texts are refused.
    """

    longest: int
    kept: tuple[int, TruncationSide] | None = None

    @property
    def takes_beginnings(self) -> bool:
        """Whether the beginning of a long text is cut off."""
        return self.kept is not None and self.kept[1] == "left"

    @classmethod
    def of(cls, serving: Serving, fields: PooledFields) -> Cut:
        """What a request asks for; raises RequestError for more tokens than a text can have here."""
        longest, keep = serving.session.input_processor.longest_text, fields.truncate_prompt_tokens
        if keep is None:
            return cls(longest)
        if keep < -1 or keep == 0 or keep > longest:
            raise RequestError(
                f"truncate_prompt_tokens must be -1 or between 1 and {longest}, as many as a text here may have, got "
                f"{keep}.",
                param="truncate_prompt_tokens",
            )
        return cls(longest, (longest if keep < 0 else keep, truncation_side(serving, fields)))

    def apply(self, tokens: Sequence[int], around: Around = NOTHING_AROUND) -> list[int]:
        """The tokens that are kept. Those that a tokenizer puts `around` a text stay around it.

        Raises:
            ContextLengthError: There are too many, and none may be cut off.
        """
        if self.kept is None:
            if len(tokens) > self.longest:
                raise ContextLengthError(len(tokens), self.longest)
            return list(tokens)
        return cut(tokens, *self.kept, around)


def truncation_side(serving: Serving, fields: PooledFields) -> TruncationSide:
    """The end that is cut off: the one that a request names, or else the one that the tokenizer's settings name."""
    side = fields.truncation_side or serving.text.tokenizer_settings.get("truncation_side")
    return "left" if side == "left" else "right"


async def pooled_texts(serving: Serving, fields: InputFields, info: PoolingInfo) -> list[PooledText]:
    """The texts of a request. Raises a RequestError that names the field and the place of what is wrong."""
    fields.check_input()
    limit = Cut.of(serving, fields)
    if fields.messages is not None:
        return [PooledText(tokens) for tokens in await _conversations(serving, fields, limit)]
    inputs, special = fields.texts(), fields.add_special_tokens is not False
    is_list = inputs is fields.input
    prompt = named_prompt(info, fields.prompt_name)
    if not isinstance(inputs[0], str):
        if fields.prompt_name is not None:
            raise RequestError("prompt_name goes with texts, not with token ids.", param="prompt_name")
        return [PooledText(tokens) for tokens in _given_tokens(inputs, limit, is_list=is_list)]
    texts = cast(list[str], inputs)
    check_texts("input", texts, is_list=is_list)
    return await encoded(serving, texts, limit, info, prompt=prompt, special=special, is_list=is_list)


async def encoded(
    serving: Serving,
    texts: Sequence[str],
    limit: Cut,
    info: PoolingInfo,
    *,
    prompt: str = "",
    special: bool = True,
    is_list: bool = True,
    param: str = "input",
) -> list[PooledText]:
    """Texts with a prompt before each, as token ids. `param` is the field that has them, as a list if `is_list`."""
    renderer = serving.renderer
    whole = [as_read(prompt + text, info) for text in texts]
    around: Around = renderer.tokenizer.around if special else NOTHING_AROUND
    skip = 0
    if prompt and not info.include_prompt:
        (tokens,) = await renderer.encode_each([as_read(prompt, info)], special, limit.longest, limit.kept)
        skip = prompt_length(tokens, around)
    with _place_named(param, is_list=is_list):
        each = await renderer.encode_each(whole, special, limit.longest, limit.kept)
    time_slice, found = TimeSlice(), list[PooledText]()
    for place, tokens in enumerate(each):
        with named_place(param, place if is_list else None):
            kept = limit.apply(tokens, around)
        has_prompt = len(kept) == len(tokens) or not limit.takes_beginnings
        found.append(PooledText(kept, skip=skip if has_prompt else 0))
        await time_slice.offer()
    return found


def check_texts(name: str, texts: Sequence[str], *, is_list: bool = True) -> None:
    """Raises a RequestError about a text of the field `name` that is empty."""
    for place, text in enumerate(texts):
        if not text:
            where = f"{name}[{place}]" if is_list else name
            raise RequestError(f"{where} is empty: send a text.", param=where)


@contextmanager
def named_place(name: str, place: int | None) -> Iterator[None]:
    """A context in which an error about a prompt names the field, and the place in it, that the client sent."""
    try:
        yield
    except RequestError as error:
        if error.param == "prompt":
            error.rename(name if place is None else f"{name}[{place}]")
        raise


@contextmanager
def _place_named(name: str, *, is_list: bool) -> Iterator[None]:
    """A context in which an error about the text at a place, which is its `param`, names the field."""
    try:
        yield
    except ContextLengthError as error:
        if error.param and error.param.isdecimal():
            error.rename(f"{name}[{error.param}]" if is_list else name)
        raise


def _given_tokens(prompts: Sequence[Prompt], limit: Cut, *, is_list: bool) -> Iterator[list[int]]:
    """Token ids as they were sent; `is_list` if there may be several lists of them."""
    for place, prompt in enumerate(prompts):
        with named_place("input", place if is_list else None):
            if not prompt:
                raise RequestError("prompt is empty: send at least one token.", param="prompt")
            yield limit.apply(cast(list[int], prompt))


async def _conversations(serving: Serving, fields: InputFields, limit: Cut) -> list[list[int]]:
    """The token ids of each conversation of a request."""
    time_slice, found = TimeSlice(), list[list[int]]()
    for chat in fields.chats():
        text = await serving.renderer.render(serving.chat.conversation(chat))
        special = bool(fields.add_special_tokens)
        with named_place("messages", None):
            tokens = await serving.renderer.encode(text, special, limit.longest, limit.kept)
            found.append(limit.apply(tokens, serving.renderer.tokenizer.around if special else NOTHING_AROUND))
        await time_slice.offer()
    return found
