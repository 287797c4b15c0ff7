"""Items as messages."""

from __future__ import annotations

import time

from quire.serving.dialects.responses.chat_request import chat_messages
from quire.serving.dialects.responses.schemas import InputItem, parse_items


def items(*each: dict[str, object]) -> list[InputItem]:
    return parse_items(list(each))


def test_what_the_model_thought_said_and_called_is_one_message() -> None:
    call = {"type": "function_call", "name": "f", "arguments": "{}"}
    messages = chat_messages("be brief", items(
        {"role": "user", "content": "a"},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
        {"role": "assistant", "content": "b"},
        call | {"call_id": "1"},
        {"role": "assistant", "content": "c"},
        call | {"call_id": "2"},
        {"type": "function_call_output", "call_id": "1", "output": "x"},
        {"role": "assistant", "content": ""},
    ))  # fmt: skip
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool", "assistant"]
    said = messages[2]
    assert (said["content"], said["reasoning"]) == ("b\nc", "t")
    assert [made["id"] for made in said["tool_calls"]] == ["1", "2"]
    assert messages[4] == {"role": "assistant", "content": ""}


def test_the_time_is_linear_in_the_items() -> None:
    """Joined one after the other, these took 34 GB of copies."""
    said = items(*[{"role": "assistant", "content": "a" * 4_000}] * 4_000)
    begun = time.thread_time()
    (message,) = chat_messages(None, said)
    assert time.thread_time() - begun < 1.0
    assert len(message["content"]) == 4_000 * 4_001 - 1


def test_a_hosted_item_that_says_nothing_is_no_turn() -> None:
    messages = chat_messages(None, items(
        {"type": "mcp_list_tools", "server_label": "s", "tools": []},
        {"role": "user", "content": "a"},
        {"type": "web_search_call", "status": "completed"},
        {"role": "user", "content": "b"},
    ))  # fmt: skip
    assert [message["role"] for message in messages] == ["user", "user"]
