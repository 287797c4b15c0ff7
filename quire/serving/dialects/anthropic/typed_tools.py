"""Tools that Anthropic's models know by their type and that the client runs, as functions for any model: a shell, an
editor of files, and a memory in files.

Source of the parameters: Anthropic's documentation of the bash, text editor and memory tools.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

_TYPE = re.compile(r"(bash|text_editor|memory)_([0-9]{8})")
_FIRST_EDITOR_WITH_INSERT_TEXT = "20250728"
_FIRST_EDITOR_WITHOUT_UNDO = "20250429"
_PATH = {"type": "string", "description": "Absolute path of a file or directory."}
_RANGE = {
    "type": "array",
    "items": {"type": "integer"},
    "description": "For view: first and last line, from 1; -1 for the end.",
}


def typed_function(kind: str) -> dict[str, Any] | None:
    """Description and parameters of the tool of this type, whose input Anthropic's clients expect; None for others."""
    match = _TYPE.fullmatch(kind)
    return None if match is None else _FUNCTIONS[match[1]](match[2])


def _bash(_: str) -> dict[str, Any]:
    return _function(
        "Run a command in a bash shell that lives on between calls, and get its output.",
        {
            "command": {"type": "string", "description": "The command; required unless restart is true."},
            "restart": {"type": "boolean", "description": "Start the shell anew."},
        },
    )


def _text_editor(date: str) -> dict[str, Any]:
    undo = ["undo_edit"] if date < _FIRST_EDITOR_WITHOUT_UNDO else []
    properties = _file_commands("insert_text" if date >= _FIRST_EDITOR_WITH_INSERT_TEXT else "new_str")
    commands = ["view", "create", "str_replace", "insert", *undo]
    return _function(
        "View, create and edit text files. view: show a file with line numbers, or a directory. create: write a file "
        "with file_text. str_replace: put new_str in place of old_str, which must be in the file exactly once. insert: "
        "put text behind insert_line.",
        {"command": {"type": "string", "enum": commands}, "path": _PATH, **properties},
        ["command", "path"],
    )


def _memory(_: str) -> dict[str, Any]:
    commands = ["view", "create", "str_replace", "insert", "delete", "rename"]
    return _function(
        "Keep notes in files under /memories, which last between conversations. Look there before you begin, and write "
        "down what will be needed later. view: show a file or directory. create: write a file with file_text. "
        "str_replace: put new_str in place of old_str. insert: put insert_text behind insert_line. delete: remove "
        "path. rename: move old_path to new_path.",
        {
            "command": {"type": "string", "enum": commands},
            "path": {"type": "string", "description": "Path under /memories; not for rename."},
            **_file_commands("insert_text"),
            "old_path": {"type": "string", "description": "For rename."},
            "new_path": {"type": "string", "description": "For rename."},
        },
        ["command"],
    )


def _file_commands(inserted: str) -> dict[str, Any]:
    """Parameters of view, create, str_replace and insert; the last one's text is called `inserted`."""
    of_replace = "For str_replace; for insert: the text." if inserted == "new_str" else "For str_replace."
    return {
        "view_range": _RANGE,
        "file_text": {"type": "string", "description": "For create: what the file contains."},
        "old_str": {"type": "string", "description": "For str_replace."},
        "new_str": {"type": "string", "description": of_replace},
        "insert_line": {"type": "integer", "description": "For insert: the line before, 0 for the beginning."},
        **({inserted: {"type": "string", "description": "For insert: the text."}} if inserted != "new_str" else {}),
    }


def _function(description: str, properties: dict[str, Any], required: list[str] | None = None) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": required or []}
    return {"description": description, "parameters": parameters}


_FUNCTIONS: dict[str, Callable[[str], dict[str, Any]]] = {
    "bash": _bash,
    "text_editor": _text_editor,
    "memory": _memory,
}
