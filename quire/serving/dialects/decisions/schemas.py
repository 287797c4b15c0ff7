"""The body of POST /v1/decisions."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field

from quire.errors import RequestError
from quire.serving.api.schemas.chat import MAX_MESSAGES, ChatMessage, not_served
from quire.serving.api.schemas.known_fields import OPENAI_FIELDS, FieldLists, Part, optional
from quire.serving.api.schemas.queue_fields import QueueFields
from quire.serving.dialects.dialect import function_call

MAX_QUESTIONS = 400
"""OpenAI's."""
DECISION_FIELDS = FieldLists(
    OPENAI_FIELDS.ignored, {**OPENAI_FIELDS.unsupported, "stream": (False,), "stream_options": ({},)}
)
"""Fields that the schema does not have."""


class DecisionPart(Part, extra="allow"):
    """A piece of content: text, or JSON that is shown as text."""

    type: str
    text: str | None = None
    refusal: str | None = None
    data: dict[str, Any] | list[dict[str, Any]] | None = None

    def shown(self, place: str) -> str:
        """The piece as text; raises a RequestError that names the place if it has none."""
        if self.type == "input_json" and self.data is not None:
            return json.dumps(self.data, ensure_ascii=False)
        text = self.refusal if self.type == "refusal" else self.text
        if self.type not in ("text", "input_text", "output_text", "refusal") or text is None:
            raise RequestError(f"{place}: {not_served(self.type[:64])}", param=place)
        return text


Content = str | Annotated[list[DecisionPart], Field(max_length=MAX_MESSAGES)]


class DecisionItem(Part, extra="allow"):
    """A message, a call of a function or tool, or what it gave."""

    type: Literal["message", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output"] = (
        "message"
    )
    role: Literal["user", "developer", "system", "assistant"] | None = None
    content: Content | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = optional("Of a function call.")
    input: str | None = optional("Of a custom tool call.")
    output: Content | None = optional("Of what was called.")

    def message(self, place: str) -> dict[str, Any]:
        """The message of a chat; raises a RequestError that names what is missing."""
        if self.type == "message":
            role, content = self._given("role", place), self._given("content", place)
            return {"role": role, "content": shown(content, f"{place}.content")}
        call_id = self._given("call_id", place)
        if self.type.endswith("_output"):
            output = shown(self._given("output", place), f"{place}.output")
            return {"role": "tool", "tool_call_id": call_id, "content": output}
        arguments = self._given("arguments" if self.type == "function_call" else "input", place)
        if self.type == "custom_tool_call":
            arguments = json.dumps({"input": arguments})
        call = function_call(call_id, self._given("name", place), arguments)
        return {"role": "assistant", "content": None, "tool_calls": [call]}

    def _given(self, name: str, place: str) -> Any:
        if (value := getattr(self, name)) is None:
            raise RequestError(f"{place}.{name} is required.", param=f"{place}.{name}")
        return value


class Choice(Part):
    """An option."""

    value: str | bool
    description: str | None = None


class Level(Part):
    """A level of a scale."""

    label: str
    description: str | None = None


class _Question(Part):
    instructions: Content
    name: str | None = optional("It comes back with the answer.")


class PredicateQuestion(_Question):
    """How likely it is that a statement about the input is true."""

    type: Literal["predicate"]


class ChoiceQuestion(_Question):
    """Which of some options fits the input."""

    type: Literal["choice"]
    choices: list[Choice] = Field(description="2 to 26 options, each once.")


class ScoreQuestion(_Question):
    """Where on a scale, whose levels come in order, the input stands."""

    type: Literal["score"]
    levels: list[Level] = Field(description="2 to 10 levels, each once, the lowest first.")


Question = Annotated[PredicateQuestion | ChoiceQuestion | ScoreQuestion, Field(discriminator="type")]


class DecisionRequest(QueueFields):
    """Questions about one input."""

    input: str | Annotated[list[DecisionItem], Field(min_length=1, max_length=MAX_MESSAGES)] = Field(
        description="A text, or the items of a conversation."
    )
    questions: list[Question] = Field(min_length=1, max_length=MAX_QUESTIONS)

    def conversation(self) -> list[dict[str, Any]]:
        """The input as messages of a chat; raises RequestError if an item is not whole."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        return [item.message(f"input[{place}]") for place, item in enumerate(self.input)]

    def with_question(self, text: str) -> list[ChatMessage]:
        """The conversation with a question behind it, which goes into the user's last message if that is the last."""
        messages = self.conversation()
        last = messages[-1]
        if last["role"] == "user":
            messages[-1] = {**last, "content": f"{last['content']}\n\n{text}"}
        else:
            messages.append({"role": "user", "content": text})
        return [ChatMessage(**message) for message in messages]


def shown(content: Content, place: str) -> str:
    """Content as one text; raises RequestError as `DecisionPart.shown` does."""
    if isinstance(content, str):
        return content
    return "\n".join(part.shown(f"{place}[{at}]") for at, part in enumerate(content))
