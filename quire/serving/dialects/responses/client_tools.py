"""Tools of /v1/responses that the client runs and that are no functions: custom tools, patches and shells.

A model calls each as a function, and its call becomes an item of the tool's own type. Such items of earlier turns
become the same calls again, so that a prompt begins as the one before it ended.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from quire.errors import UnsupportedField
from quire.serving.api.schemas.custom_tools import custom_function, custom_input

CLIENT_TOOLS = ("apply_patch", "custom", "local_shell", "shell")
"""Types of tools."""
ITEM_TYPES = {
    "custom": "custom_tool_call",
    "apply_patch": "apply_patch_call",
    "shell": "shell_call",
    "local_shell": "local_shell_call",
}
"""The type of a call's item, by the tool's."""
PREFIXES = {"custom": "ctc", "apply_patch": "apc", "shell": "sh", "local_shell": "lsh"}
"""What the ids of items begin with, by the tool's type."""
_CUSTOM_FIELDS = ("type", "name", "description", "format", "defer_loading", "allowed_callers")
_TEXT = {"type": "string"}
_TEXTS = {"type": "array", "items": _TEXT}
_TIMEOUT = {"type": "integer", "description": "Milliseconds after which it is ended."}


def client_function(tool: Mapping[str, Any], place: str) -> dict[str, Any]:
    """The function that a model is shown for a tool of one of these types; raises RequestError if the tool is wrong."""
    match tool["type"]:
        case "custom":
            return _custom(tool, place)
        case "apply_patch":
            return _function(
                "apply_patch",
                "Create, update or delete a file. diff is a diff in the V4A format: lines that begin with '+' are "
                "added, those with '-' removed, those with a space stay, and '@@' names the place. For create_file "
                "each line begins with '+'; delete_file has no diff.",
                {
                    "type": {"type": "string", "enum": ["create_file", "update_file", "delete_file"]},
                    "path": _TEXT,
                    "diff": _TEXT,
                },
                ["type", "path"],
            )
        case "shell":
            return _function(
                "shell",
                "Run shell commands on the user's machine, and get their output.",
                {
                    "commands": _TEXTS,
                    "timeout_ms": _TIMEOUT,
                    "max_output_length": {"type": "integer", "description": "Most characters of output."},
                },
                ["commands"],
            )
    return _function(
        "local_shell",
        'Run a command on the user\'s machine, and get its output. command is a list: ["bash", "-c", "ls"].',
        {"command": _TEXTS, "working_directory": _TEXT, "timeout_ms": _TIMEOUT},
        ["command"],
    )


def call_fields(kind: str, arguments: str) -> dict[str, Any] | None:
    """What the item of a call says, for the tool's type and the JSON that the model wrote; None if that is not what the
    tool takes. A custom tool takes any text."""
    if kind == "custom":
        return {"input": custom_input(arguments)}
    try:
        value = json.loads(arguments)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        return None
    match kind:
        case "apply_patch":
            return _patch(value)
        case "shell" if _are_texts(value.get("commands")):
            limits = {name: _whole(value.get(name)) for name in ("timeout_ms", "max_output_length")}
            return {"action": {"commands": value["commands"], **limits}}
        case "local_shell" if _are_texts(value.get("command")):
            where, timeout = value.get("working_directory"), _whole(value.get("timeout_ms"))
            more = {"working_directory": where if isinstance(where, str) else None, "timeout_ms": timeout}
            return {"action": {"type": "exec", "command": value["command"], "env": {}, **more}}
    return None


def call_arguments(item: Mapping[str, Any]) -> str:
    """The JSON that a model wrote for a call of an earlier turn, for its item."""
    kind = item.get("type")
    if kind == "custom_tool_call":
        said: Any = {"input": item.get("input")}
    else:
        said = item.get("operation" if kind == "apply_patch_call" else "action")
    said = said if isinstance(said, Mapping) else {}
    left_out = ("env", "type") if kind == "local_shell_call" else ()
    kept = {name: value for name, value in said.items() if value is not None and name not in left_out}
    return json.dumps(kept, ensure_ascii=False)


def output_text(item: Mapping[str, Any]) -> str:
    """What an item about the output of a patch or shell says to a model."""
    output = item.get("output")
    if item.get("type") == "apply_patch_call_output":
        status = str(item.get("status", ""))
        return "\n".join([status, output]) if isinstance(output, str) and output else status
    if not isinstance(output, list):
        return output if isinstance(output, str) else ""
    lines: list[str] = []
    for part in output:
        if not isinstance(part, dict):
            continue
        lines += [part[name] for name in ("stdout", "stderr") if isinstance(part.get(name), str) and part[name]]
        outcome = part.get("outcome")
        if isinstance(outcome, dict) and outcome.get("type") == "timeout":
            lines.append("[timed out]")
        elif isinstance(outcome, dict) and outcome.get("exit_code"):
            lines.append(f"[exit code {outcome['exit_code']}]")
    return "\n".join(lines)


def _function(name: str, description: str, properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "name": name, "description": description, "parameters": parameters}


def _custom(tool: Mapping[str, Any], place: str) -> dict[str, Any]:
    for name, value in tool.items():
        if name not in _CUSTOM_FIELDS and value not in (None, False):
            raise UnsupportedField(f"{place}.{name[:64]}")
    return {"type": "function", **custom_function(tool, tool.get("format"), place)}


def _patch(value: dict[str, Any]) -> dict[str, Any] | None:
    kind, path, diff = value.get("type"), value.get("path"), value.get("diff")
    if not isinstance(path, str):
        return None
    if kind == "delete_file":
        return {"operation": {"type": kind, "path": path}}
    if kind in ("create_file", "update_file") and isinstance(diff, str):
        return {"operation": {"type": kind, "path": path, "diff": diff}}
    return None


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, str) for each in value)


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
