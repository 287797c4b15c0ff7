"""From texts and pairs of texts, in any form that `LLM` takes, to the token ids that are pooled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from quire.errors import ContextLengthError, RequestError
from quire.foundation.messages.from_engine import PoolingInfo
from quire.offline.local_engine import LocalEngine
from quire.offline.prompts import Prompt, parse_prompt
from quire.text.pooled_texts import (
    NOTHING_AROUND,
    as_read,
    cut,
    has_pair_roles,
    named_prompt,
    prompt_length,
    rendered_pair,
)
from quire.text.text_pairs import PairLimits
from quire.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from quire.text.chat_template import ChatTemplate

_OPTIONS = ("truncation", "max_length", "truncate_prompt_tokens", "add_special_tokens")


class PooledText(NamedTuple):
    """A text as the engine takes it; `skip` is how many of the first tokens are not pooled."""

    tokens: list[int]
    cache_salt: str = ""
    token_types: bytes = b""
    skip: int = 0


@dataclass(frozen=True)
class TextOptions:
    """How texts become tokens.

    Attributes:
        keep: How many tokens are kept; -1: as many as fit; None: longer texts are refused.
        special: Whether what the model puts around a text is added.
        prompt_name: Of the model's prompts; None: the default one.
        prompt: A prompt in its place.
    """

    keep: int | None = None
    special: bool = True
    prompt_name: str | None = None
    prompt: str | None = None

    @classmethod
    def of(
        cls,
        keep: int | None,
        more: Mapping[str, Any] | None,
        prompt_name: str | None = None,
        prompt: str | None = None,
    ) -> TextOptions:
        """Read a method's arguments. Raises RequestError for an option that is not served."""
        more = more or {}
        if unknown := sorted(more.keys() - set(_OPTIONS)):
            raise RequestError(f"tokenization_kwargs with '{unknown[0]}' is not supported: leave it out.",
                               param="tokenization_kwargs")  # fmt: skip
        if prompt_name is not None and prompt is not None:
            raise RequestError("Give prompt or prompt_name, not both.", param="prompt_name")
        asked = more.get("truncate_prompt_tokens", more.get("max_length"))
        if more.get("truncation") and asked is None:
            asked = -1
        return cls(asked if keep is None else keep, more.get("add_special_tokens") is not False, prompt_name, prompt)

    def prompt_of(self, info: PoolingInfo) -> str:
        """Return the text that goes before each text."""
        if self.prompt is not None:
            return self.prompt
        return named_prompt(info, self.prompt_name)

    def limit(self, longest: int) -> int | None:
        """Return the maximum number of tokens of a text that is cut; None: it is not."""
        if self.keep is None:
            return None
        if isinstance(self.keep, bool) or not isinstance(self.keep, int) or self.keep < -1 or not self.keep:
            raise RequestError("truncate_prompt_tokens must be -1 or at least 1.", param="truncate_prompt_tokens")
        if self.keep > longest:
            raise RequestError(
                f"truncate_prompt_tokens must be at most {longest}, as many as a text here may have, got {self.keep}.",
                param="truncate_prompt_tokens",
            )
        return longest if self.keep < 0 else self.keep


def texts_of(
    local: LocalEngine, info: PoolingInfo, prompts: Sequence[Prompt], options: TextOptions
) -> list[PooledText]:
    """Return prompts as token ids. Raises RequestError for what is no prompt, and ContextLengthError for a text that is
    too long and may not be cut."""
    before, limit = options.prompt_of(info), options.limit(local.input_processor.longest_text)
    skip: int | None = None
    found = []
    for prompt in prompts:
        text = prompt.get("prompt") if isinstance(prompt, Mapping) and "prompt_token_ids" not in prompt else prompt
        if isinstance(text, str):
            tokenizer = local.tokenizer()
            whole = as_read(before + text, info)
            tokens = _cut(tokenizer.encode(whole, options.special), limit, tokenizer, special=options.special)
            if skip is None:
                skip = _prompt_length(tokenizer, as_read(before, info), options) if _leaves_out(before, info) else 0
            salt = str(prompt.get("cache_salt") or "") if isinstance(prompt, Mapping) else ""
            found.append(PooledText(tokens, salt, skip=skip))
            continue
        types = b""
        if isinstance(prompt, Mapping) and "token_type_ids" in prompt:
            types = _types(prompt["token_type_ids"])
            prompt = {name: value for name, value in prompt.items() if name != "token_type_ids"}
        parsed = parse_prompt(prompt, local.tokenizer)
        found.append(PooledText(parsed.tokens[:limit], parsed.cache_salt, types[:limit]))
    return found


def pairs_of(
    local: LocalEngine,
    info: PoolingInfo,
    pairs: Sequence[tuple[str, str]],
    options: TextOptions,
    chat_template: str | None,
) -> list[PooledText]:
    """Return each pair as the model reads it: by a template, or as the tokenizer puts two texts together, or one text
    behind the other where the model reads one text only.

    Raises:
        RequestError: The template refuses a pair.
        ContextLengthError: A pair is too long and may not be cut.
    """
    tokenizer, longest = local.tokenizer(), local.input_processor.longest_text
    limit, template = options.limit(longest), _pair_template(local, chat_template)
    if info.lowercases:
        pairs = [(first.lower(), second.lower()) for first, second in pairs]
    if template is not None or not info.reads_pairs:
        texts = ["".join(pair) if template is None else rendered_pair(template, pair) for pair in pairs]
        each = [_cut(tokens, limit, tokenizer, special=True) for tokens in tokenizer.encode_each(texts)]
        return [PooledText(tokens) for tokens in each]
    encoded = tokenizer.encode_pairs(pairs, PairLimits(limit))
    for tokens, _ in encoded:
        if len(tokens) > longest:
            raise ContextLengthError(len(tokens), longest)
    return [PooledText(tokens, token_types=bytes(types)) for tokens, types in encoded]


def _pair_template(local: LocalEngine, given: str | None) -> ChatTemplate | None:
    """Return the template of pairs: the one given, or the model's if it has roles of these names."""
    if given is not None:
        return local.text.other_chat_template(given)
    own = local.text.chat_template
    return own if own is not None and has_pair_roles(own) else None


def _cut(tokens: list[int], limit: int | None, tokenizer: Tokenizer, *, special: bool) -> list[int]:
    """Return at most `limit` tokens: what the model puts around a text stays around it."""
    return tokens if limit is None else cut(tokens, limit, around=tokenizer.around if special else NOTHING_AROUND)


def _leaves_out(prompt: str, info: PoolingInfo) -> bool:
    return bool(prompt) and not info.include_prompt


def _prompt_length(tokenizer: Tokenizer, prompt: str, options: TextOptions) -> int:
    """Return how many tokens a prompt has before a text: all but those that end a text."""
    around = tokenizer.around if options.special else NOTHING_AROUND
    return prompt_length(tokenizer.encode(prompt, options.special), around)


def _types(given: Any) -> bytes:
    try:
        return bytes(given)
    except (TypeError, ValueError):
        raise RequestError("token_type_ids must be a list of 0 and 1.", param="token_type_ids") from None
