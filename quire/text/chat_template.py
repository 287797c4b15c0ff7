"""Chat messages to the text a model reads, by the model's own jinja template.

Decides what the template is given and what its errors become. Knows nothing about tokens or HTTP.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.sandbox

from quire.errors import CheckpointError, RequestError
from quire.text.arrangements import arrangements, has_later_system, system_texts
from quire.text.message_form import PROBE_TOOL, CallForm, find_call_form, fit
from quire.text.template_sandbox import counted_range, limited, template_environment

DEFAULT = "default"
"""The name of the template that is used unless a request names another."""
_FOR_TOOLS = "tool_use"
logger = logging.getLogger(__name__)
_MARK = "CONTINUE_FINAL_MESSAGE_TAG "


class ChatTemplate:
    """One compiled template. Rendering is safe in several threads.

    Attributes:
        variables: Names a request may set: those the template reads and Quire does not set itself.
        shows_tools, shows_documents: Whether the template reads them.
        reads_parts: Whether a message's content may be a list of parts, which the template goes through.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str] | None = None,
        others: Mapping[str, ChatTemplate] | None = None,
    ) -> None:
        """Compile jinja text. Raises CheckpointError if it is no template.

        Args:
            special_tokens: `bos_token`, `eos_token` and the like, by name.
            others: The model's other templates by their names; `tool_use` is for conversations with tools.
        """
        self.source = source
        self._special_tokens = {"bos_token": "", "eos_token": "", **(special_tokens or {})}
        try:
            environment = template_environment()
            self._template = environment.from_string(source)
            parsed = environment.parse(source)
            read = jinja2.meta.find_undeclared_variables(parsed)
        except (jinja2.TemplateError, RecursionError) as error:
            raise CheckpointError(f"The chat template cannot be compiled: {error}.") from error
        ours = {"messages", "tools", "documents", "add_generation_prompt", *self._special_tokens, *environment.globals}
        self.variables = frozenset(read - ours)
        self._others = others or {}
        self.shows_tools = "tools" in read or _FOR_TOOLS in self._others
        self.shows_documents = "documents" in read
        self.reads_parts = _goes_through_content(parsed)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the model's templates, if there are several."""
        return (DEFAULT, *self._others) if self._others else ()

    def with_tools(self) -> ChatTemplate:
        """The template for conversations with tools."""
        return self._others.get(_FOR_TOOLS, self)

    def replaced(self, source: str) -> ChatTemplate:
        """Another template for the same model, from jinja text or the name of one of the model's. Raises
        CheckpointError if the text is no template."""
        if source == DEFAULT and DEFAULT in self.names:
            return ChatTemplate(self.source, self._special_tokens)
        return self._others.get(source) or ChatTemplate(source, self._special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation, rendered as it was sent where the template takes that.

        Calls are given the form that the template shows. A conversation that the template refuses, or of which it
        passes over a
        system message, is arranged anew if that helps: see `arrangements`.

        Args:
            messages: Plain JSON data; content is a string, or a list of parts if the template reads these.
            add_generation_prompt: End with the opening of an assistant message.
            continue_final_message: End inside the last message, for the model to go on with it.
            variables: Further variables, from `self.variables`.

        Raises:
            RequestError: The template refuses the messages, or the request asks for what cannot be.
        """
        self._check(variables or {}, add_generation_prompt, continue_final_message)
        values: dict[str, Any] = {
            **self._special_tokens,
            **(variables or {}),
            "tools": list(tools) if tools else None,
            "documents": list(documents) if documents else None,
            "add_generation_prompt": add_generation_prompt,
        }
        knows_developer = "developer" in self.source
        chat = [fit(message, lambda: self._call_form, knows_developer=knows_developer) for message in messages]
        refusal = None
        try:
            text = self._rendered(chat, values, continue_final_message)
            if not has_later_system(chat) or _shows(text, chat):
                return text
        except _TemplateRefusal as error:
            refusal = error
        tried = [chat]
        for arranged in arrangements(chat):
            if arranged in tried or (continue_final_message and not _end_alike(arranged, chat)):
                continue
            tried.append(arranged)
            with contextlib.suppress(_TemplateRefusal):
                other = self._rendered(arranged, values, continue_final_message)
                if _shows(other, chat):
                    logger.debug("the chat template does not take a conversation as it was sent: arranged anew")
                    return other
        if refusal is not None:
            raise RequestError(refusal.message, param="messages") from refusal
        return text

    @cached_property
    def _call_form(self) -> CallForm:
        def rendered(messages: Sequence[Mapping[str, Any]]) -> str | None:
            values = {**self._special_tokens, "tools": [PROBE_TOOL], "documents": None, "add_generation_prompt": True}
            try:
                return self._run({**values, "messages": messages, "range": counted_range()})
            except RequestError:
                return None

        return find_call_form(rendered)

    def _rendered(self, chat: Sequence[dict[str, Any]], values: dict[str, Any], continued: bool) -> str:
        chat = list(chat)
        if continued:
            _mark_end(chat)
        text = self._run({**values, "messages": chat, "range": counted_range()})
        return _cut_at_mark(text) if continued else text

    def _check(self, variables: Mapping[str, Any], add_generation_prompt: bool, continue_final_message: bool) -> None:
        for name in variables:
            if name not in self.variables:
                known = ", ".join(sorted(self.variables)) or "none"
                raise RequestError(
                    f"chat_template_kwargs: '{name}' is no variable of this model's chat template (it has: {known}).",
                    param="chat_template_kwargs",
                )
        if add_generation_prompt and continue_final_message:
            raise RequestError(
                "continue_final_message needs add_generation_prompt=false: the two exclude each other.",
                param="continue_final_message",
            )

    def _run(self, values: dict[str, Any]) -> str:
        try:
            return "".join(limited(self._template.generate(values)))
        except jinja2.TemplateError as error:
            raise _TemplateRefusal(
                f"The chat template refuses these messages: {error.message}", param="messages"
            ) from error
        except RequestError:
            raise
        except Exception as error:  # whatever foreign code runs into: RecursionError, TypeError, MemoryError …
            raise _TemplateRefusal("The chat template cannot render these messages.", param="messages") from error


class _TemplateRefusal(RequestError):
    """A template does not take messages as they are."""


def _mark_end(chat: list[dict[str, Any]]) -> None:
    content = chat[-1].get("content") if chat else None
    if isinstance(content, list) and content and isinstance(content[-1].get("text"), str):
        chat[-1] = {**chat[-1], "content": [*content[:-1], {**content[-1], "text": content[-1]["text"] + _MARK}]}
    elif isinstance(content, str):
        chat[-1] = {**chat[-1], "content": content + _MARK}
    else:
        raise RequestError("continue_final_message needs a last message with text.", param="messages")


def _shows(text: str, chat: Sequence[dict[str, Any]]) -> bool:
    """Whether a prompt has all that system messages say."""
    behind = 0  # most stand in their order, and are found without searching all of the prompt for each
    for said in system_texts(chat):
        at = text.find(said, behind)
        if at < 0:
            at = text.find(said)
        if at < 0:
            return False
        behind = at + len(said)
    return True


def _end_alike(arranged: Sequence[dict[str, Any]], chat: Sequence[dict[str, Any]]) -> bool:
    """Whether what is to be continued still ends the conversation."""
    end, before = (_last_text(one[-1].get("content")) if one else "" for one in (arranged, chat))
    return end.endswith(before) and arranged[-1].get("role") == chat[-1].get("role")


def _last_text(content: Any) -> str:
    if isinstance(content, list) and content and isinstance(content[-1], dict):
        content = content[-1].get("text")
    return content if isinstance(content, str) else ""


def _goes_through_content(template: jinja2.nodes.Template) -> bool:
    """Whether there is a loop over `message.content`, or over a name that was set to it."""
    content: set[str] = set()
    for assignment in template.find_all(jinja2.nodes.Assign):
        if isinstance(assignment.target, jinja2.nodes.Name) and _is_content(assignment.node, content):
            content.add(assignment.target.name)
    return any(_is_content(loop.iter, content) for loop in template.find_all(jinja2.nodes.For))


def _is_content(node: jinja2.nodes.Node, names: Collection[str]) -> bool:
    match node:
        case jinja2.nodes.Getattr(attr="content"):
            return True
        case jinja2.nodes.Getitem(arg=jinja2.nodes.Const(value="content")):
            return True
        case jinja2.nodes.Name(name=name):
            return name in names
    return False


def _cut_at_mark(text: str) -> str:
    at = text.rfind(_MARK.strip())
    if at < 0:
        raise RequestError(
            "continue_final_message: this model's chat template does not show the last message.", param="messages"
        )
    kept_space = text.startswith(_MARK, at)
    return text[:at] if kept_space else text[:at].rstrip()
