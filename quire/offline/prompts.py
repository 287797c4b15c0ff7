"""A user's prompts, in any of the forms that `LLM` takes, as token ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NotRequired, TypedDict

from quire.errors import RequestError
from quire.output_parsers.formats import Turn
from quire.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, `{"prompt": text}` or `{"prompt_token_ids": ids}`; the last two with an optional `cache_salt`."""


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt as token ids; `prompt` is its text, where that is known."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


class ParsedPrompt(NamedTuple):
    """One prompt; `text` is None where only token ids were given, `turn` where it is no conversation."""

    text: str | None
    tokens: list[int]
    cache_salt: str = ""
    turn: Turn | None = None


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list. A list of integers is one prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if prompts and (_are_ints(prompts) or all(isinstance(item, int) for item in prompts)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def parse_prompt(prompt: Prompt, tokenizer: Callable[[], Tokenizer]) -> ParsedPrompt:
    """A prompt with its token ids.

    Args:
        prompt: See Prompt.
        tokenizer: Returns the model's; called for text only.

    Raises:
        RequestError: A field that is not supported.
    """
    salt = ""
    if isinstance(prompt, Mapping):
        if unknown := prompt.keys() - {"prompt", "prompt_token_ids", "cache_salt"}:
            raise RequestError(f"A prompt with '{min(unknown)}' is not supported: leave it out.", param=min(unknown))
        salt = str(prompt.get("cache_salt") or "")
        if "prompt_token_ids" in prompt:
            return ParsedPrompt(prompt.get("prompt"), list(prompt["prompt_token_ids"]), salt)
        prompt = prompt.get("prompt", "")
    if isinstance(prompt, str):
        return ParsedPrompt(prompt, tokenizer().encode(prompt), salt)
    tokens: list[Any] = list(prompt)
    return ParsedPrompt(None, tokens if _are_ints(tokens) else [int(token) for token in tokens], salt)


def _are_ints(items: Sequence[Any]) -> bool:
    """Whether all are of type int, and not of a subclass or numpy's; fast for long prompts."""
    return set(map(type, items)) == {int}
