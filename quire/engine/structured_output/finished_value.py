"""Checks a finished JSON value against its whole schema, whatever a grammar could enforce of it.

For the checker's process: a schema may ask for more than time and memory allow. Patterns and formats are those of the
grammar compiler, which follows them in linear time; look-around, which it does not know, is Python's. Formats of
JSON Schema that it does not know are in `formats`; all others are annotations.
"""

from __future__ import annotations

import json
import re
from decimal import Decimal, InvalidOperation, localcontext
from functools import cache, lru_cache
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from quire.engine.structured_output.formats import CHECKED, PATTERNS
from quire.engine.structured_output.grammars import PARSER_LIMITS
from quire.engine.structured_output.json_schema import FORMATS
from quire.engine.structured_output.messages import FinishedValue

_DRAFTS = {
    "draft-03": "Draft3Validator", "draft-04": "Draft4Validator", "draft-06": "Draft6Validator",
    "draft-07": "Draft7Validator", "2019-09": "Draft201909Validator", "2020-12": "Draft202012Validator",
}  # fmt: skip
_LONGEST_PLACE = 120
_DIGITS = 1_000
"""Digits of a quotient that decides whether a number is a multiple."""
_MATCHERS = 64
"""How many patterns and formats are kept compiled."""


def problem_of(value: FinishedValue) -> str:
    """What is wrong with a value, as part of a sentence; empty if it is valid."""
    from jsonschema.exceptions import ValidationError, best_match

    try:
        schema, instance = (json.loads(text, parse_float=_number) for text in (value.schema, value.text))
    except (ValueError, RecursionError):
        return "it is not JSON"
    except InvalidOperation:
        return "it could not be checked (a number has too large an exponent)"
    try:
        with localcontext(prec=_DIGITS):
            error = best_match(_validator(schema).iter_errors(instance))
    except Exception as problem:  # of many kinds, each for a way in which a schema can be malformed
        return f"it could not be checked ({' '.join(str(problem).split())[:_LONGEST_PLACE]})"
    if error is None:
        return ""
    assert isinstance(error, ValidationError)
    where = "/".join(map(str, error.absolute_path))[:_LONGEST_PLACE]
    return f"{f'/{where}' if where else 'all of it'} breaks '{error.validator}'"


def _number(text: str) -> int | Decimal:
    """A number as it is written, so that multiples are exact; 1.0 is an integer."""
    number = Decimal(text)
    return int(number) if number.adjusted() < 400 and number == number.to_integral_value() else number


def _validator(schema: Any) -> Any:
    """A validator of the draft that a schema names, or else of one with the keywords of all drafts."""
    from jsonschema import validators
    from jsonschema_specifications import REGISTRY

    named = str(schema.get("$schema", "")) if isinstance(schema, dict) else ""
    drafts = (kind for draft, kind in _DRAFTS.items() if draft in named)
    kind = next((validators.extend(getattr(validators, each), _TEXTS) for each in drafts), None)
    return (kind or _of_all_drafts())(schema, registry=REGISTRY)  # nothing is fetched


def _matches(pattern: str, text: str) -> bool:
    """Whether a pattern is found in a text; raises re.error for one that nobody reads."""
    found = _is_of(json.dumps({"type": "string", "pattern": pattern}), text)
    return re.search(pattern, text) is not None if found is None else found


def _is_of(schema: str, text: str) -> bool | None:
    """Whether a text is valid under a schema that the compiler enforces in full; None if it does not compile."""
    matcher = _matcher(schema)
    if matcher.is_error():
        return None
    following, spelled = matcher.deep_copy(), list(json.dumps(text, ensure_ascii=False).encode(errors="replace"))
    return bool(following.try_consume_tokens(spelled) == len(spelled) and following.is_accepting())


@lru_cache(_MATCHERS)
def _matcher(schema: str) -> LLMatcher:
    grammar = LLMatcher.grammar_from_json_schema(schema)
    return LLMatcher(LLTokenizer("byte"), grammar, limits=PARSER_LIMITS, log_level=0)


def _pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Any:
    from jsonschema.exceptions import ValidationError

    if isinstance(instance, str) and not _matches(pattern, instance):
        yield ValidationError("it does not match")


def _format(validator: Any, name: Any, instance: Any, schema: Any) -> Any:
    from jsonschema.exceptions import ValidationError

    if isinstance(instance, str) and isinstance(name, str) and not _is_of_format(name, instance):
        yield ValidationError("it is not of the format")


def _is_of_format(name: str, text: str) -> bool:
    if name in CHECKED:
        return CHECKED[name](text)
    if name in PATTERNS:
        return _matches(PATTERNS[name], text)
    return name not in FORMATS or bool(_is_of(json.dumps({"format": name}), text))


def _pattern_properties(validator: Any, patterns: Any, instance: Any, schema: Any) -> Any:
    if isinstance(instance, dict):
        for pattern, inner in patterns.items():
            for name, value in instance.items():
                if _matches(pattern, name):
                    yield from validator.descend(value, inner, path=name, schema_path=pattern)


def _additional_properties(validator: Any, inner: Any, instance: Any, schema: Any) -> Any:
    from jsonschema.exceptions import ValidationError

    if isinstance(instance, dict):
        listed, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
        for name, value in instance.items():
            if name not in listed and not any(_matches(pattern, name) for pattern in patterns):
                if inner is False:
                    yield ValidationError("it is not listed", path=[name])
                else:
                    yield from validator.descend(value, inner, path=name)


_TEXTS = {
    "pattern": _pattern,
    "format": _format,
    "patternProperties": _pattern_properties,
    "additionalProperties": _additional_properties,
}
"""How keywords that read texts are checked in all drafts."""


@cache
def _of_all_drafts() -> Any:
    """Draft 2020-12 with the keywords that older drafts have besides, as the grammar has them."""
    from jsonschema.validators import Draft3Validator, Draft4Validator, Draft7Validator, Draft202012Validator, extend

    older, newer = Draft7Validator.VALIDATORS, Draft202012Validator.VALIDATORS

    def items(validator: Any, items: Any, instance: Any, schema: Any) -> Any:
        return (older if isinstance(items, list) else newer)["items"](validator, items, instance, schema)

    def bound(keyword: str) -> Any:
        def check(validator: Any, value: Any, instance: Any, schema: Any) -> Any:
            exclusive = schema.get(f"exclusive{keyword.capitalize()}")
            kind = Draft4Validator if isinstance(exclusive, bool) else Draft202012Validator
            return kind.VALIDATORS[keyword](validator, value, instance, schema)

        return check

    def exclusive_bound(keyword: str) -> Any:
        def check(validator: Any, value: Any, instance: Any, schema: Any) -> Any:
            return None if isinstance(value, bool) else newer[keyword](validator, value, instance, schema)

        return check

    return extend(
        Draft202012Validator,
        {
            "items": items,
            **_TEXTS,
            "additionalItems": older["additionalItems"],
            "dependencies": older["dependencies"],
            **{keyword: Draft3Validator.VALIDATORS[keyword] for keyword in ("disallow", "divisibleBy", "extends")},
            **{keyword: bound(keyword) for keyword in ("minimum", "maximum")},
            **{keyword: exclusive_bound(keyword) for keyword in ("exclusiveMinimum", "exclusiveMaximum")},
        },
    )
