"""The fields that ask for a form of the output: OpenAI's, vLLM's, and vLLM's older ones (`guided_…`)."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from pydantic import BaseModel, Field

from quire.errors import RequestError
from quire.serving.api.schemas.known_fields import Part, optional
from quire.structured_outputs_params import StructuredOutputsParams


class JsonSchemaFormat(Part):
    """A JSON schema and what it is called."""

    name: str | None = optional("Not used.")
    description: str | None = optional("Not used.")
    schema_: dict[str, Any] | None = Field(default=None, alias="schema", description="The schema.")
    strict: bool | None = optional(
        "A schema that cannot be enforced in full is refused; else what cannot be enforced is checked at the end."
    )


class ResponseFormat(Part):
    """OpenAI's form of an answer, with structural tags as vLLM has them."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    schema_: dict[str, Any] | None = Field(
        default=None, alias="schema", description="Of json_object, as other servers have it; json_schema has its own."
    )
    structures: list[dict[str, Any]] | None = optional("Of structural tags: begin, schema, end.")
    triggers: list[str] | None = optional("Of structural tags: texts that a tag begins with.")
    format: dict[str, Any] | None = optional("Of structural tags: their newer form.")

    def params(self) -> StructuredOutputsParams | None:
        """Check the form and convert it to StructuredOutputsParams; None for plain text."""
        if self.schema_ is not None and self.type != "json_object":
            raise RequestError(
                f"response_format: schema belongs to type json_object, not to {self.type}.", param="response_format"
            )
        match self.type:
            case "text":
                return None
            case "json_object" if self.schema_ is not None:
                return StructuredOutputsParams(json=self.schema_, strict=False, name="response_format")
            case "json_object":
                return StructuredOutputsParams(json_object=True, name="response_format")
            case "json_schema":
                if self.json_schema is None or self.json_schema.schema_ is None:
                    raise RequestError(
                        "response_format: json_schema.schema is missing: send the schema.", param="response_format"
                    )
                return StructuredOutputsParams(
                    json=self.json_schema.schema_, strict=bool(self.json_schema.strict), name="response_format"
                )
            case "structural_tag":
                tag = self.model_dump(include={"type", "structures", "triggers", "format"}, exclude_none=True)
                return StructuredOutputsParams(structural_tag=tag, name="response_format")


class OutputFormFields(BaseModel):
    """At most one of them may be sent."""

    response_format: ResponseFormat | None = optional("Text, any JSON object, or a JSON schema.")
    structured_outputs: dict[str, Any] | None = optional(
        "One of json, regex, choice, grammar, json_object, structural_tag; with disable_any_whitespace, "
        "disable_additional_properties, whitespace_pattern, strict."
    )
    guided_json: str | dict[str, Any] | None = optional("Older name of structured_outputs.json.")
    guided_regex: str | None = optional("Older name of structured_outputs.regex.")
    guided_choice: list[str] | None = optional("Older name of structured_outputs.choice.")
    guided_grammar: str | None = optional("Older name of structured_outputs.grammar.")
    guided_whitespace_pattern: str | None = optional("Older name of structured_outputs.whitespace_pattern.")

    def output_form(self) -> StructuredOutputsParams | None:
        """The form that is asked for; None for any text. Raises RequestError for several, or a malformed one."""
        found: dict[str, StructuredOutputsParams] = {}
        if self.response_format is not None and (params := self.response_format.params()) is not None:
            found["response_format"] = params
        if self.structured_outputs:
            found["structured_outputs"] = _structured_outputs(self.structured_outputs)
        for kind in ("json", "regex", "choice", "grammar"):
            if (value := getattr(self, f"guided_{kind}")) is not None:
                options = {kind: value, "whitespace_pattern": self.guided_whitespace_pattern}
                found[f"guided_{kind}"] = StructuredOutputsParams(**options, name=f"guided_{kind}")
        if len(found) > 1:
            first, second = list(found)[:2]
            raise RequestError(f"{second} cannot be combined with {first}: send one of them.", param=second)
        return next(iter(found.values()), None)


def _structured_outputs(fields: dict[str, Any]) -> StructuredOutputsParams:
    given = {name: value for name, value in fields.items() if value is not None}
    known = [name for name in StructuredOutputsParams.__struct_fields__ if name != "name"]
    for name in given:
        if name not in known:
            raise RequestError(
                f"structured_outputs: '{name[:64]}' is not one of {', '.join(known)}.", param="structured_outputs"
            )
    try:
        return msgspec.convert(given, StructuredOutputsParams)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, RequestError):
            raise error.__cause__ from None
        raise RequestError(f"structured_outputs: {str(error).replace('`', '')}.", param="structured_outputs") from None
