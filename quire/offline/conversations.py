"""Conversations as prompts, by the model's chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.errors import ConfigError, RequestError
from quire.offline.prompts import ParsedPrompt, shown
from quire.text.model_text import ModelText
from quire.text.output_parsers.formats import Turn

Message = Mapping[str, Any]


def as_conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[Sequence[Message]]:
    """One conversation or several, as a list.

    Raises:
        RequestError: It is neither.
    """
    if isinstance(messages, list | tuple) and messages and not isinstance(messages[0], Mapping):
        return list(messages)
    return [messages]  # type: ignore[list-item]  # `prompt` says what is wrong


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, list | tuple):
        raise _no_conversation(messages)
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise _no_conversation(message)


def _no_conversation(value: Any) -> RequestError:
    form = 'A conversation is a list of messages, [{"role": "user", "content": "Hello"}]'
    return RequestError(f"{form}; got {shown(value)}.", param="messages")


class ConversationRenderer:
    """Renders conversations that are alike but for their messages.

    Args:
        text: Of the model.
        add_generation_prompt: End the prompt with the opening of an answer.
        continue_final_message: Go on with the last message instead.
        chat_template: Another template than the model's, as jinja source.
        tools: What the model may call, as in OpenAI's API.
        chat_template_kwargs: Variables of the template; hints about reasoning are dropped where it reads none.

    Raises:
        ConfigError: The model has neither a chat template nor, by skip_tokenizer_init, a tokenizer.
        CheckpointError: `chat_template` is no jinja template.
    """

    def __init__(
        self,
        text: ModelText,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        template = text.chat_template
        if text.tokenizer is None or (template is None and chat_template is None):
            raise ConfigError("This model has no chat template: pass chat_template=... to LLM, or use generate().")
        if chat_template is not None:
            template = text.other_chat_template(chat_template)
        assert template is not None
        self._tokenizer = text.tokenizer
        self._template = template.with_tools() if tools else template
        variables = text.hints.used(chat_template_kwargs or {}, self._template.variables)
        self._options: dict[str, Any] = {
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "variables": variables,
        }

    def prompt(self, messages: Sequence[Message]) -> ParsedPrompt:
        """One conversation, as plain data.

        Raises:
            RequestError: They are no messages, or the template refuses them.
        """
        _check_messages(messages)
        text = self._template.render(messages, **self._options)
        continued = messages[-1].get("content") if messages and self._options["continue_final_message"] else ""
        turn = Turn.behind(text, continued if isinstance(continued, str) else "")
        return ParsedPrompt(text, self._tokenizer.encode(text, add_special_tokens=False), turn=turn)
