"""What becomes of texts and pairs before a model makes something of them as a whole: prompts, cuts, templates."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from quire.errors import RequestError
from quire.foundation.messages.from_engine import PoolingInfo

if TYPE_CHECKING:
    from quire.text.chat_template import ChatTemplate

Side = Literal["left", "right"]
Around = tuple[Sequence[int], Sequence[int]]
"""The tokens before and behind a text that are not its own, see `Tokenizer.around`."""
NOTHING_AROUND: Around = ((), ())
_ROLES = ("query", "document")
_NAMED = tuple(re.compile(rf"""['"]{role}['"]""") for role in _ROLES)


def as_read(text: str, info: PoolingInfo) -> str:
    """The text as the model was trained to read it."""
    return text.lower() if info.lowercases else text


def named_prompt(info: PoolingInfo, name: str | None, param: str = "prompt_name") -> str:
    """The prompt of this name, or the model's default one; raises a RequestError about `param` for an unknown name."""
    if name is None:
        return info.prompts.get(info.default_prompt, "")
    if name not in info.prompts:
        known = f"it has {', '.join(sorted(info.prompts))}" if info.prompts else "it has none: leave it out"
        raise RequestError(f"{param} '{name[:64]}' is no prompt of this model; {known}.", param=param)
    return info.prompts[name]


def cut(tokens: Sequence[int], count: int, side: Side = "right", around: Around = NOTHING_AROUND) -> list[int]:
    """At most `count` of a text's tokens, cut off at one side. What stands around the text stays around it."""
    if len(tokens) <= count:
        return list(tokens)
    before, behind = len(around[0]), len(around[1])
    inner, room = tokens[before : len(tokens) - behind], max(0, count - before - behind)
    part = inner[:room] if side == "right" else inner[len(inner) - room :]
    return [*tokens[:before], *part, *tokens[len(tokens) - behind :]][:count]


def prompt_length(tokens: Sequence[int], around: Around) -> int:
    """How many tokens a prompt, encoded alone, has in front of a text: all but those that end a text."""
    return len(tokens) - len(around[1])


def has_pair_roles(template: ChatTemplate) -> bool:
    """Whether a chat template is one of pairs: it has the roles `query` and `document`."""
    return all(role.search(template.source) for role in _NAMED)


def rendered_pair(template: ChatTemplate, pair: tuple[str, str], variables: Mapping[str, Any] | None = None) -> str:
    """One text of a query and a document. Raises RequestError if the template refuses them."""
    messages = [{"role": role, "content": text} for role, text in zip(_ROLES, pair, strict=True)]
    return template.render(messages, add_generation_prompt=False, variables=variables)
