"""A limit on reasoning, from its number of tokens to the tokens by which the engine sees reasoning begin and end."""

from __future__ import annotations

from quire.errors import RequestError
from quire.foundation.messages.to_engine import ThinkingBudget
from quire.text.output_parsers.formats import Turn
from quire.text.output_parsers.registry import reasoning_format
from quire.text.tokenizer import Tokenizer

_NAME = "thinking_token_budget"


def thinking_budget(
    tokens: int | None, reasoning_parser: str | None, tokenizer: Tokenizer | None, turn: Turn | None = None
) -> ThinkingBudget | None:
    """Return what the engine needs to end the reasoning after at most `tokens` tokens; None where it need not, as with
    None or -1 tokens. `turn` tells how the turn begins in the prompt; None where the prompt is no conversation, and its
    end tells. Raises RequestError if the model's reasoning is not known, or does not begin and end by tokens of its
    own."""
    if tokens is None or tokens < 0:
        return None
    if reasoning_parser is None or tokenizer is None:
        raise RequestError(
            f"{_NAME}: how this model reasons is not known: leave it out, or start the server with --reasoning-parser.",
            param=_NAME,
        )
    tags = reasoning_tokens(reasoning_parser, tokenizer)
    if tags is None:
        raise RequestError(
            f"{_NAME}: this model's reasoning does not begin and end by tokens of its own: leave it out.", param=_NAME
        )
    found = reasoning_format(reasoning_parser)
    opened = None if turn is None else found.opened(turn)
    if opened is False:
        return None
    in_prompt = None if turn is None else opened is True
    return ThinkingBudget(tokens, *tags, again=bool(found.answer_start), opened=in_prompt)


def reasoning_tokens(reasoning_parser: str, tokenizer: Tokenizer) -> tuple[list[int], list[list[int]]] | None:
    """The tokens that begin reasoning, and each way to end it; None if these are not tokens of their own."""
    found = reasoning_format(reasoning_parser)
    start, end, *others = (_token_ids(tokenizer, text) for text in (found.start, found.end, *found.interrupts))
    return (start, [end, *filter(None, others)]) if start and end else None


def _token_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a tag; empty if its first token is not one of its own: other texts would have these tokens."""
    whole = tokenizer.token_id(text)
    if whole is not None:
        return [whole]
    ids = tokenizer.encode(text, add_special_tokens=False)
    return ids if ids and ids[0] in tokenizer.added_ids else []
