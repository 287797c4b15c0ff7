"""Tools that the client runs and that are no functions: custom ones, patches and shells, there and back again."""

from __future__ import annotations

import json
import re
from typing import Any

import openai
import pytest

from quire.serving.api.schemas.tools import ChatTool, tool_use
from quire.serving.dialects.responses.client_tools import call_fields
from quire.serving.dialects.responses.tools import ResponseTools
from tests.api.responses.wire import connect, events_of, kinds, response_of
from tests.api.server import Server, prompts_sent
from tests.api.speaker import Speaker

PATCH = "*** Begin Patch\n*** Add File: a.py\n+print('ä')\n*** End Patch"
CUSTOM: Any = {
    "type": "custom",
    "name": "edit",
    "description": "Edit files.",
    "format": {"type": "text"},
}
LARK = {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch" /(.|\\n)+/'}
SHELL: Any = {"type": "shell", "environment": {"type": "local"}}
EXIT: Any = {"type": "exit", "exit_code": 2}
CASES: list[Any] = [
    (
        CUSTOM,
        ("edit", {"input": PATCH}),
        {"type": "custom_tool_call", "name": "edit", "input": PATCH},
        {"type": "custom_tool_call_output", "output": "Done."},
        "Done.",
    ),
    (
        {"type": "apply_patch"},
        ("apply_patch", {"type": "create_file", "path": "a.py", "diff": "+1"}),
        {"type": "apply_patch_call", "operation": {"type": "create_file", "path": "a.py", "diff": "+1"}},
        {"type": "apply_patch_call_output", "status": "failed", "output": "No such folder."},
        "failed\nNo such folder.",
    ),
    (
        SHELL,
        ("shell", {"commands": ["ls", "cat x"], "timeout_ms": 500}),
        {
            "type": "shell_call",
            "action": {"commands": ["ls", "cat x"], "timeout_ms": 500, "max_output_length": None},
        },
        {"type": "shell_call_output", "output": [{"stdout": "a", "stderr": "no x", "outcome": EXIT}]},
        "a\nno x\n[exit code 2]",
    ),
    (
        {"type": "local_shell"},
        ("local_shell", {"command": ["ls"], "working_directory": "/tmp"}),
        {
            "type": "local_shell_call",
            "action": {
                "type": "exec", "command": ["ls"], "env": {}, "working_directory": "/tmp", "timeout_ms": None,
            },
        },
        {"type": "local_shell_call_output", "output": '{"output": "a"}'},
        '{"output": "a"}',
    ),
]  # fmt: skip


@pytest.fixture
def server(conversations: tuple[Server, Speaker]) -> Server:
    return conversations[0]


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return connect(server)


def ask(server: Server, **fields: Any) -> dict[str, Any]:
    """A response, whose types were checked."""
    return response_of(server, {"input": "How is the weather?", **fields})


def written(call: tuple[str, Any]) -> str:
    """The call of a function, as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': call[0], 'arguments': call[1]}, ensure_ascii=False)}\n</tool_call>"


@pytest.mark.parametrize(("tool", "call", "item", "output", "shown"), CASES, ids=[case[0]["type"] for case in CASES])
def test_a_call_comes_back_as_the_tools_own_item_and_goes_in_again(
    server: Server, model: Speaker, tool: Any, call: Any, item: dict[str, Any], output: dict[str, Any], shown: str
) -> None:
    model.text = written(call)
    with prompts_sent(server) as sent:
        body = ask(server, tools=[tool])
        (said,) = body["output"]
        assert said.items() >= item.items()
        assert said.get("status", "completed") == "completed"
        model.text = "Good."
        named = "id" if tool["type"] == "local_shell" else "call_id"
        history = [{"role": "user", "content": "How is the weather?"}, said, {**output, named: said[named]}]
        ask(server, tools=[tool], input=history)
        kept = ask(server, tools=[tool], previous_response_id=body["id"], input=history[2:])
    assert kept["output"][0]["content"][0]["text"] == "Good."
    first, second, third = (server.post("/detokenize", {"tokens": tokens}).json()["prompt"] for tokens in sent)
    begun, answered = second[: len(first)], second[len(first) :]
    assert begun == first, "the prefix is the same"
    assert third == second
    assert json.loads(answered.partition("<tool_call>\n")[2].partition("\n</tool_call>")[0])["arguments"] == call[1]
    assert answered.endswith(f"<|im_start|>tool\n{shown}<|im_end|>\n<|im_start|>assistant\n")


def test_a_custom_call_has_events_of_its_own(server: Server, client: openai.OpenAI, model: Speaker) -> None:
    model.text = f"Let me see. {written(('edit', {'input': PATCH}))}{written(('edit', {'input': 'second'}))}"
    events = events_of(server, {"input": "Edit.", "tools": [CUSTOM]})
    call = [
        "response.output_item.added",
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
        "response.output_item.done",
    ]
    assert kinds(events)[-9:] == [*call, *call, "response.completed"]
    done = next(event for event in events if event["type"] == "response.custom_tool_call_input.done")
    assert done["input"] == PATCH
    with client.responses.stream(model="tiny", input="Edit.", tools=[CUSTOM]) as stream:
        for _ in stream:
            pass
        items = stream.get_final_response().output
    assert [item.input for item in items if item.type == "custom_tool_call"] == [PATCH, "second"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_cut_off_is_not_lost(server: Server, model: Speaker, stream: bool) -> None:
    """A cut custom call has the text so far, and one that is no call yet is text."""
    for tool, call in ((CUSTOM, ("edit", {"input": PATCH})), (SHELL, ("shell", {"commands": ["ls -l /usr/share"]}))):
        model.text = written(call)
        limit = (
            len(model.text) * 2 // 3 if model.tokenizer is None else len(model.tokenizer.encode(model.text)) * 4 // 5
        )
        fields = {"tools": [tool], "max_output_tokens": limit}
        if stream:
            body = events_of(server, {"input": "Go.", **fields})[-1]["response"]
        else:
            body = ask(server, **fields)
        assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        (item,) = body["output"]
        if tool is CUSTOM:
            assert (item["type"], PATCH.startswith(item["input"])) == ("custom_tool_call", True)
            assert item["input"]
        else:
            assert (item["type"], item["status"]) == ("message", "incomplete")
            assert '{"commands": ["ls' in item["content"][0]["text"]


@pytest.mark.parametrize(
    ("kind", "arguments", "fields"),
    [
        ("custom", '{"input": "a\\n\\u00e4\\u00', {"input": "a\nä"}),
        ("custom", '{"patch": "a"}', {"input": "a"}),
        ("custom", '{"a": "x", "b": "y"}', {"input": '{"a": "x", "b": "y"}'}),
        ("custom", "print(1)", {"input": "print(1)"}),
        ("custom", '"quoted"', {"input": "quoted"}),
        ("apply_patch", '{"type": "delete_file", "path": "a"}', {"operation": {"type": "delete_file", "path": "a"}}),
        ("apply_patch", '{"type": "create_file", "path": "a"}', None),
        ("apply_patch", '{"type": "move", "path": "a"}', None),
        ("shell", '{"commands": "ls"}', None),
        ("local_shell", '{"command": []}', None),
        ("shell", "[1]", None),
    ],
)
def test_what_models_write_wrongly(kind: str, arguments: str, fields: Any) -> None:
    assert call_fields(kind, arguments) == fields


@pytest.mark.parametrize("choice", [{"type": "custom", "name": "edit"}, {"type": "shell"}])
def test_they_can_be_chosen(choice: Any) -> None:
    name = choice.get("name", "shell")
    assert ResponseTools.of([CUSTOM, SHELL], choice).choice == {"type": "function", "function": {"name": name}}
    allowed = ResponseTools.of([CUSTOM, SHELL], {"type": "allowed_tools", "mode": "required", "tools": [choice]})
    assert [tool["function"]["name"] for tool in allowed.chat_tools] == [name]


def test_grammars_of_the_input_are_shown_and_enforced() -> None:
    pattern = {"type": "grammar", "syntax": "regex", "definition": "[0-9]+|none"}
    number, edit = ResponseTools.of(
        [{**CUSTOM, "name": "number", "format": pattern}, {**CUSTOM, "format": LARK}], None
    ).chat_tools
    assert number["function"]["strict"]
    (allowed,) = number["function"]["parameters"]["properties"].values()
    assert [re.search(allowed["pattern"], text) is not None for text in ("42", "none", "42x", "a none")] == [
        True, True, False, False,
    ]  # fmt: skip
    assert LARK["definition"] in edit["function"].description
    used = tool_use(
        [ChatTool.model_validate({"type": "function", "function": edit["function"]})], "auto", parallel=True
    )
    assert used is not None
    assert used.constrained
    assert used.tools[0].input_grammar == LARK["definition"]
