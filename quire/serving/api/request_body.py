"""Reads and decodes request bodies, and says what is wrong with them. Every route with a body refuses in the same
words."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from quire.errors import RequestError
from quire.serving.api.large_requests.readers import CheckBody, LargeRequestReaders
from quire.serving.api.schemas.known_fields import (
    NO_FIELDS,
    OPENAI_FIELDS,
    REFUSED_FIELDS,
    FieldLists,
    UnknownFields,
    served_fields,
)

Schema = TypeVar("Schema", bound=BaseModel)

READ_TIMEOUT_S = 120.0
MAX_VALUES = 2**20
"""Maximum number of values in a body, counted by commas: a number takes more memory and time than a byte of text."""
MAX_OBJECTS = 2**16
"""Maximum number of objects in a body, counted by opening braces: one costs a hundred times as much as a number."""
LARGE_BYTES, LARGE_VALUES = 2**17, 2**12
"""Bodies of more bytes or values are large: another process decodes and checks them first, so that what is wrong costs
nothing here. What is right is cheap to decode, and decoded in a thread."""
MAX_REPORTED = 1_000
"""A body with more wrong values is refused as a whole: to describe each would take longer than to find it."""
MAX_PLACE = 200
"""Maximum number of characters of a field's place in a message."""
_MALFORMED = re.compile(r"JSON is malformed: (.+) \(byte (\d+)\)")
_HALF_PAIR = re.compile(rb"\\u[dD][89a-fA-F]")
_DICTIONARY = re.compile(r"a valid dictionary( or instance of \w+)?")
_CLASS_NAME = re.compile(r"(?:[A-Z][a-z]+)+")  # of a union's members; fields are written in lower case
_UNION_TAGS = frozenset({"str", "int", "float", "bool", "list", "dict"})


async def read_body(
    request: Request, schema: type[Schema], lists: FieldLists = OPENAI_FIELDS, *, any_type: bool = False
) -> Schema:
    """The request's body, checked. Fields that the schema does not have and the API knows are in `lists`.

    With `any_type`, JSON may be announced as something else, as curl does by default; not by a browser, where any page
    could send that. Raises RequestError if the body is not JSON, or has a field that is not served or is wrong;
    HTTPException with 415 for another content type, or with 408 for a body that does not arrive.
    """
    raw, unknown = await _read(request, any_type=any_type), _unknown_fields(request, lists)
    if not await _check_large(request, raw, schema, lists):
        return check_fields(decode_body(raw), schema, lists, unknown)
    return await asyncio.to_thread(lambda: check_fields(decode_body(raw), schema, lists, unknown))


async def read_object(request: Request) -> dict[str, Any]:
    """The request's body as a JSON object of any fields; raises as `read_body` does."""
    raw = await _read(request)
    if not await _check_large(request, raw, None, NO_FIELDS):
        return decode_body(raw)
    return await asyncio.to_thread(decode_body, raw)


async def check_object(
    request: Request, body: dict[str, Any], schema: type[Schema], lists: FieldLists = OPENAI_FIELDS
) -> Schema:
    """The result of `read_object` for a request, checked as `read_body` does."""
    unknown = _unknown_fields(request, lists)
    if not await _check_large(request, await request.body(), schema, lists):
        return check_fields(body, schema, lists, unknown)
    return await asyncio.to_thread(check_fields, body, schema, lists, unknown)


def _unknown_fields(request: Request, lists: FieldLists) -> UnknownFields:
    """What decides about unknown fields; bodies of operators, which have no lists, may have none."""
    decides: UnknownFields = request.app.state.unknown_fields
    return REFUSED_FIELDS if lists is NO_FIELDS else decides


async def _check_large(request: Request, raw: bytes, schema: type[BaseModel] | None, lists: FieldLists) -> bool:
    """Check a large body in another process; raises as `read_body` does. Returns whether the body is large."""
    large = len(raw) > LARGE_BYTES or raw.count(b",") > LARGE_VALUES
    if large:
        readers: LargeRequestReaders = request.app.state.readers
        await readers.ask(CheckBody.of(raw, schema, lists, _unknown_fields(request, lists).ignored))
    return large


async def _read(request: Request, *, any_type: bool = False) -> bytes:
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    lenient = any_type and "origin" not in request.headers
    if kind != "application/json" and not kind.endswith("+json") and not lenient:
        raise HTTPException(415, "Send JSON, with the header 'Content-Type: application/json'.")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise HTTPException(415, "Send the body as it is, without a Content-Encoding.")
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            return await request.body()
    except TimeoutError:
        raise HTTPException(408, "The request body did not arrive in time.") from None
    except ClientDisconnect:
        raise RequestError("The request body broke off.") from None


def decode_body(raw: bytes) -> dict[str, Any]:
    """A body as a JSON object; raises RequestError if it is none, or has too many values."""
    if raw.count(b",") >= MAX_VALUES:
        raise RequestError(f"The request body has more than {MAX_VALUES} values: send less at a time.")
    if raw.count(b"{") > MAX_OBJECTS:
        raise RequestError(f"The request body has more than {MAX_OBJECTS} objects or braces: send less at a time.")
    try:
        body = msgspec.json.decode(raw)
    except RecursionError:
        raise RequestError("The request body is nested too deeply.") from None
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
        if _HALF_PAIR.search(raw) and (place := _place_of_half_pair(raw)) is not None:
            place = place[:MAX_PLACE]
            raise RequestError(
                f"{place or 'The request body'} has half of a surrogate pair (\\ud800 to \\udfff), which is no "
                "character: send both halves, or leave it out.",
                param=place or None,
            ) from None
        raise RequestError(f"The request body is not valid JSON: {_fault(raw, error)}.") from None
    if not isinstance(body, dict):
        raise RequestError("The request body must be a JSON object.")
    return body


def check_fields(
    body: dict[str, Any],
    schema: type[Schema],
    lists: FieldLists = OPENAI_FIELDS,
    unknown: UnknownFields = REFUSED_FIELDS,
) -> Schema:
    """The fields of a body, checked; raises RequestError as `read_body` does."""
    try:
        return schema.model_validate(served_fields(body, schema.model_fields, lists, unknown))
    except ValidationError as error:
        if error.error_count() > MAX_REPORTED:
            raise RequestError(f"The request body has {error.error_count()} values that are wrong.") from None
        raise _wrong_value(error) from None


def openapi_body(*schemas: type[BaseModel]) -> dict[str, Any]:
    """The `openapi_extra` of a route that reads a body of one of these schemas, which the document has by name."""
    refs = [{"$ref": f"#/components/schemas/{schema.__name__}"} for schema in schemas]
    content: dict[str, Any] = refs[0] if len(refs) == 1 else {"anyOf": refs}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": content}}}}


def _fault(raw: bytes, error: Exception) -> str:
    if not raw.strip():
        return "it is empty"
    try:
        raw.decode()
    except UnicodeDecodeError as wrong:
        return f"it is no UTF-8 from byte {wrong.start} on"
    malformed = _MALFORMED.match(str(error))
    if malformed is not None:
        return f"{malformed[1]} at byte {malformed[2]}"
    return "a number is out of range" if "out of range" in str(error) else "it breaks off too early"


def _place_of_half_pair(raw: bytes) -> str | None:
    """The field with half a surrogate pair; empty if the name of a field has it, None if the body has another fault."""
    try:
        left = [iter([("", json.loads(raw))])]
    except (ValueError, RecursionError):
        return None
    names: list[str] = []  # where each of these stands
    while left:
        name, value = next(left[-1], (None, None))
        if name is None:
            left.pop()
            del names[-1:]
        elif isinstance(value, dict) and all(map(_is_text, value)):
            names.append(name)
            left.append((f".{each[:64]}", entry) for each, entry in value.items())
        elif isinstance(value, list):
            names.append(name)
            left.append((f"[{i}]", entry) for i, entry in enumerate(value))
        elif isinstance(value, dict) or (isinstance(value, str) and not _is_text(value)):
            return "".join([*names, name]).removeprefix(".")
    return None


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _wrong_value(error: ValidationError) -> RequestError:
    """All that is wrong with the first wrong field; of a union's members, the one that came closest counts."""
    details = error.errors(include_url=False, include_input=False)
    worst = max((d for d in details if d["loc"][0] == details[0]["loc"][0]), key=lambda d: len(d["loc"]))
    place = _place(worst)
    messages = (d["msg"][:200].removeprefix("Input should be ") for d in details if _place(d) == place)
    texts = dict.fromkeys(_DICTIONARY.sub("an object", message) for message in messages)
    if worst["type"] == "too_long":
        return RequestError(f"{place} may have at most {worst['ctx']['max_length']} entries.", param=place)
    if worst["type"] == "too_short" and worst["ctx"]["min_length"] == 1:
        return RequestError(f"{place} must not be empty.", param=place)
    if worst["type"] == "missing":
        return RequestError(f"'{place}' is required.", param=place)
    if worst["type"] == "extra_forbidden":
        return RequestError(f"'{place}' is not a known field.", param=place)
    return RequestError(f"{place} must be {' or '.join(texts)}.", param=place)


def _place(detail: ErrorDetails) -> str:
    """The place of a fault, as `messages[0].content`, without the names of union members."""
    place = ""
    for part in detail["loc"]:
        if isinstance(part, int):
            place += f"[{part}]"
        elif part.isidentifier() and part not in _UNION_TAGS and not _CLASS_NAME.fullmatch(part):
            place += f".{part[:64]}" if place else part[:64]
    return place
