"""Conversations that a chat template does not take, arranged as it might: the same words in other turns.

APIs take a system message anywhere and several turns of one role in a row. Many templates take one system message, in
front, and turns that alternate. Nothing of the messages' text is lost.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

Message = dict[str, Any]
_SYSTEM = ("system", "developer")
_BETWEEN = "\n\n"
_ID_LENGTH = 9


def arrangements(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Other forms of a conversation, the one nearest to it first. Some may be equal. Tool calls in `messages` must
    have the form that the template takes."""
    for named in (messages, _with_short_ids(messages)):
        yield list(named)
        folded = _in_user_turns(named)
        yield folded
        yield _alternating(folded)
        yield _alternating(_in_front(named))
        yield _alternating(_without_system(named))


def system_texts(messages: Sequence[Message]) -> list[str]:
    """What system messages say, part by part."""
    return [text.strip() for message in messages if _is_system(message) for text in _texts(message.get("content"))]


def has_later_system(messages: Sequence[Message]) -> bool:
    """Whether there is a system message that is not the first message: templates may pass over it."""
    return any(_is_system(message) for message in messages[1:])


def _is_system(message: Message) -> bool:
    return message.get("role") in _SYSTEM


def _texts(content: Any) -> list[str]:
    if isinstance(content, str):
        return [content]
    parts = content if isinstance(content, list) else ()
    return [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]


def _with_short_ids(messages: Sequence[Message]) -> Sequence[Message]:
    """Messages whose calls have ids of nine letters and digits, as Mistral's templates want it."""

    def short(name: Any) -> Any:
        if not isinstance(name, str) or (len(name) == _ID_LENGTH and name.isalnum()):
            return name
        return hashlib.sha256(name.encode(errors="replace")).hexdigest()[:_ID_LENGTH]

    def renamed(call: Any) -> Any:
        return {**call, "id": short(call["id"])} if isinstance(call, dict) and "id" in call else call

    named = []
    for message in messages:
        if isinstance(calls := message.get("tool_calls"), list):
            message = {**message, "tool_calls": [renamed(call) for call in calls]}
        if "tool_call_id" in message:
            message = {**message, "tool_call_id": short(message["tool_call_id"])}
        named.append(message)
    return named


def _in_user_turns(messages: Sequence[Message]) -> list[Message]:
    """Messages with one system message in front at most; a later one becomes a part of the user's turn beside it, or
    is a turn itself. So it keeps its place, and what stands before it is the same prompt as without it."""
    leading = next((i for i, message in enumerate(messages) if not _is_system(message)), len(messages))
    turns = [list(messages[:leading])] if leading else []
    moved = False  # whether the turn before came from a system message
    for message in messages[leading:]:
        moves = _is_system(message)
        if moves:
            message = {**message, "role": "user"}
        if (moves or moved) and message.get("role") == "user" and turns and turns[-1][0].get("role") == "user":
            turns[-1].append(message)
        else:
            turns.append([message])
        moved = moves
    return [_merged(turn) for turn in turns]


def _in_front(messages: Sequence[Message]) -> list[Message]:
    """Messages with all system messages as one, in front."""
    system = [message for message in messages if _is_system(message)]
    return ([_merged(system)] if system else []) + _others(messages)


def _others(messages: Sequence[Message]) -> list[Message]:
    return [message for message in messages if not _is_system(message)]


def _without_system(messages: Sequence[Message]) -> list[Message]:
    """Messages whose first turn of the user begins with what system messages say."""
    system, others = [{**message, "role": "user"} for message in messages if _is_system(message)], _others(messages)
    if system and others and others[0].get("role") == "user":
        return [_merged([*system, others[0]]), *others[1:]]
    return [_merged(system), *others] if system else others


def _alternating(messages: Sequence[Message]) -> list[Message]:
    """Messages with successive turns of the user, or of the assistant, joined. Calls stay where they are."""
    turns: list[list[Message]] = []
    for message in messages:
        before = turns[-1][0] if turns else {}
        plain = all(one.keys() <= {"role", "content"} for one in (before, message))
        if plain and message.get("role") == before.get("role") and message.get("role") in ("user", "assistant"):
            turns[-1].append(message)
        else:
            turns.append([message])
    return [_merged(turn) for turn in turns]


def _merged(messages: Sequence[Message]) -> Message:
    """The first message, with the contents of all. There may be thousands, so they are joined at once."""
    if len(messages) == 1:
        return messages[0]
    contents = [content for message in messages if (content := message.get("content"))]
    if all(isinstance(content, str) for content in contents):
        return {**messages[0], "content": _BETWEEN.join(contents)}
    parts = _parts(contents[0])
    for content in contents[1:]:
        parts += [{"type": "text", "text": _BETWEEN}, *_parts(content)]
    return {**messages[0], "content": parts}


def _parts(content: Any) -> list[Any]:
    return list(content) if isinstance(content, list) else [{"type": "text", "text": content}]
