"""The form that a request wants its output to have: plain data, checked when built. Names and rules are vLLM's."""

from __future__ import annotations

import json as json_library
from typing import Any

import msgspec

from quire.errors import RequestError

MAX_CONSTRAINT_BYTES = 256 * 1024
MAX_CHOICES = 4_096
MAX_WHITESPACE_PATTERN = 256
"""Maximum characters of the pattern."""
KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


class StructuredOutputsParams(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """The form that an output must have: exactly one of the first six attributes.

    Attributes:
        json: A JSON schema, as an object or as text.
        regex: A regular expression that the whole output matches.
        choice: The output is one of these texts.
        grammar: A context-free grammar, in EBNF (`root ::= …`) or in Lark's syntax.
        json_object: True for any JSON object.
        structural_tag: Free text in which certain tags are followed by a certain form, as an object or as JSON text.
        disable_any_whitespace: No whitespace between the parts of JSON.
        disable_additional_properties: Objects have no other properties than those that their schema lists.
        whitespace_pattern: A regular expression for the whitespace between the parts of JSON.
        strict: Refuse a JSON schema that cannot be enforced in full; if false, the rest is left out, and
            a server checks it when the output is finished.
        name: The client's name for the field, for error messages.

    Raises:
        RequestError: Not exactly one form is given, or it is invalid; `param` names the field.
    """

    json: str | bool | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    strict: bool = True
    name: str = "structured_outputs"

    def __post_init__(self) -> None:
        given = [kind for kind in KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            raise self.error(f"exactly one of {', '.join(KINDS)} is needed, got {' and '.join(given) or 'none'}.")
        if self.json_object is False:
            raise self.error("json_object=false asks for nothing: leave it out.")
        if self.kind == "choice":
            self._check_choice()
        elif self.kind != "json_object":
            self._check_text()
        self._check_whitespace()

    @property
    def kind(self) -> str:
        """Which of KINDS is given."""
        return next(kind for kind in KINDS if getattr(self, kind) is not None)

    @property
    def text(self) -> str:
        """The given form as text: JSON if it is no text itself."""
        value = getattr(self, self.kind)
        return value if isinstance(value, str) else json_library.dumps(value, ensure_ascii=False)

    def error(self, message: str) -> RequestError:
        """A refusal that names the field as the client sent it."""
        return RequestError(f"{self.name}: {message}", param=self.name)

    def _check_choice(self) -> None:
        if not isinstance(self.choice, list) or not all(isinstance(text, str) for text in self.choice):
            raise self.error("choice must be a list of texts.")
        if not self.choice or len(self.choice) > MAX_CHOICES:
            raise self.error(f"choice must have 1 to {MAX_CHOICES} texts, got {len(self.choice)}.")
        if "" in self.choice:
            raise self.error("a choice must not be empty.")
        self._check_size(self.text)

    def _check_text(self) -> None:
        value = getattr(self, self.kind)
        if self.kind in ("regex", "grammar") and not isinstance(value, str):
            raise self.error(f"{self.kind} must be a text.")
        try:
            text = self.text
        except (TypeError, ValueError, RecursionError):
            raise self.error(f"{self.kind} cannot be written as JSON text.") from None
        self._check_size(text)
        if not text.strip():
            raise self.error(f"{self.kind} is empty.")
        if self.kind in ("json", "structural_tag"):
            try:
                parsed = json_library.loads(text)
            except (ValueError, RecursionError):
                raise self.error(f"{self.kind} must be a JSON object or its text.") from None
            if "\\u" in text:
                self._check_size(json_library.dumps(parsed, ensure_ascii=False))
            if not isinstance(parsed, dict) and not (self.kind == "json" and isinstance(parsed, bool)):
                raise self.error(f"{self.kind} must be a JSON object.")

    def _check_size(self, text: str) -> None:
        try:
            size = len(text.encode())
        except UnicodeEncodeError:
            raise self.error(f"{self.kind} cannot be written as text: it has half a surrogate pair.") from None
        if size > MAX_CONSTRAINT_BYTES:
            raise self.error(f"{self.kind} is limited to {MAX_CONSTRAINT_BYTES} bytes, got {size}.")

    def _check_whitespace(self) -> None:
        pattern = self.whitespace_pattern
        if pattern is None:
            return
        if not isinstance(pattern, str) or len(pattern) > MAX_WHITESPACE_PATTERN:
            raise self.error(f"whitespace_pattern must be a text of at most {MAX_WHITESPACE_PATTERN} characters.")
        self._check_size(pattern)
        if self.disable_any_whitespace:
            raise self.error("whitespace_pattern and disable_any_whitespace contradict each other: send one of them.")


GuidedDecodingParams = StructuredOutputsParams
"""What vLLM called it before."""
