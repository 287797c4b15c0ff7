"""Where a model keeps its chat templates, and which of them counts, as transformers does it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quire.errors import CheckpointError, ConfigError
from quire.text.chat_template import DEFAULT, ChatTemplate
from quire.text.tokenizer_files import read_json, read_settings, token_text

_FILE, _DIRECTORY = "chat_template.jinja", "additional_chat_templates"


def load_chat_template(directory: Path, override: str | None = None) -> ChatTemplate | None:
    """Return the template that goes with a tokenizer's directory; None when it has none. `override` is a jinja text, a
    file with one, or the name of one of the model's, to be used instead.

    A model may have several, by name: `default` is used, `tool_use` where there are tools, any other where it is named.
    They are in chat_template.jinja and additional_chat_templates/*.jinja; else in chat_template.json or
    processor_config.json, else in tokenizer_config.json. Raises CheckpointError if the directory's template is broken,
    and ConfigError if `override` is neither a file nor a template.
    """
    settings = read_settings(directory).values
    special = {name: text for name in settings if name.endswith("_token") and (text := token_text(settings[name]))}
    if override is not None and _is_jinja(override):
        return ChatTemplate(override, special)
    found = _named_templates(directory, settings.get("chat_template"))
    if override in found:
        return ChatTemplate(found[override], special)
    if override is not None:
        return ChatTemplate(_read_override(override, found), special)
    if not found:
        return None
    if DEFAULT not in found and len(found) > 1:
        raise CheckpointError(
            f"{directory} has chat templates named {', '.join(sorted(found))}, and none is the default: name one with "
            "--chat-template."
        )
    others = {name: ChatTemplate(source, special) for name, source in found.items() if name != DEFAULT}
    return ChatTemplate(found.get(DEFAULT) or next(iter(found.values())), special, others)


def _named_templates(directory: Path, in_settings: Any) -> dict[str, str]:
    files = {path.stem: path for path in sorted((directory / _DIRECTORY).glob("*.jinja"))}
    if (directory / _FILE).exists():
        files[DEFAULT] = directory / _FILE
    if files:
        return {name: _read(path) for name, path in files.items()}
    for entry in (
        read_json(directory / "chat_template.json").get("chat_template"),
        read_json(directory / "processor_config.json").get("chat_template"),
        in_settings,
    ):
        if entry:
            return _by_name(entry)
    return {}


def _by_name(entry: Any) -> dict[str, str]:
    """Templates by name, from a text, texts by name, or a list of objects with both."""
    if isinstance(entry, str):
        return {DEFAULT: entry}
    if isinstance(entry, list):
        entry = {each.get("name"): each.get("template") for each in entry if isinstance(each, dict)}
    named = entry.items() if isinstance(entry, dict) else ()
    return {name: text for name, text in named if isinstance(name, str) and isinstance(text, str)}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}): download it again.") from None


def _is_jinja(text: str) -> bool:
    return any(sign in text for sign in ("{{", "{%", "\n"))


def _read_override(override: str, found: dict[str, str]) -> str:
    try:
        return Path(override).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        named = f", nor one of the model's ({', '.join(sorted(found))})" if len(found) > 1 else ""
        raise ConfigError(
            f"--chat-template {override!r} is neither a readable file nor a jinja template{named}.",
            param="chat_template",
        ) from error
