"""Where the references of a JSON schema lead: `$ref` by pointer, by anchor, and to schemas with an `$id` inside it.

Owns resolving them within one document. Knows nothing about what a schema means.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import unquote, urljoin

MAX_DEPTH = 64
"""How deep schemas may be nested."""
MAPS = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"))
"""Keywords whose value has schemas by name, as the next two have lists of schemas and one schema."""
LISTS = frozenset(("allOf", "anyOf", "oneOf", "prefixItems", "items"))
SINGLE = frozenset((
    "additionalItems", "additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then",
    "unevaluatedItems", "unevaluatedProperties",
))  # fmt: skip
_CHAIN = 4_096
"""Longest chain of references that lead to each other."""
_MAX_MERGED = 8
_INDEX = re.compile(r"[0-9]{1,9}")


class SchemaReferences:
    """The references of one document (`root`). Its parts are told apart by identity, so it must stay as it is.
    `too_deep` says that schemas are nested more than MAX_DEPTH deep, which are not read."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self.too_deep = False
        self._older_ids = isinstance(root, Mapping) and "draft-04" in str(root.get("$schema", ""))
        self._bases: dict[int, str] = {}  # by identity of a schema
        self._resources: dict[str, Any] = {"": root}  # by URI, or URI and anchor
        self._kept: list[Any] = []  # an identity is one only as long as its object lives
        self._enter(root, "")

    def target(self, schema: Mapping[str, Any]) -> Any:
        """What the `$ref` of a schema leads to. Raises LookupError: KeyError if that is another document."""
        reference = schema["$ref"]
        if not isinstance(reference, str):
            raise IndexError("$ref must be a text")
        base = self._bases.get(id(schema), "")
        full = base + reference if reference.startswith("#") else _joined(base, reference)
        uri, _, fragment = full.partition("#")
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            uri = f"{uri}#{fragment}"
            if uri not in self._resources:
                raise IndexError(reference)
            return self._resources[uri]
        return self._at(fragment, self._resources[uri], uri)

    def resolved(self, schema: Any) -> Any:
        """A schema, or where its references lead if it is nothing but a reference; None if they lead nowhere."""
        for _ in range(_CHAIN):
            if not isinstance(schema, Mapping) or "$ref" not in schema:
                return schema
            try:
                schema = self.target(schema)
            except LookupError:
                return None
        return None

    def merged(self, schema: Any) -> dict[str, Any]:
        """A schema with what it refers to, by itself or as the only one of its `allOf`; what stands beside that goes
        first. {} for what is no object."""
        merged: dict[str, Any] = {}
        for _ in range(_MAX_MERGED):
            if not isinstance(schema, Mapping):
                break
            parts, inner = schema.get("allOf"), None
            if "$ref" in schema:
                with suppress(LookupError):
                    inner = self.target(schema)
            elif isinstance(parts, list) and len(parts) == 1:
                inner = parts[0]
            if not isinstance(inner, Mapping):
                return {**schema, **merged}
            merged = {key: value for key, value in schema.items() if key not in ("$ref", "allOf")} | merged
            schema = inner
        return merged

    def add(self, uri: str, schema: dict[str, Any], original: Any) -> dict[str, Any]:
        """Add a schema that was made from one of the document, and return a reference to it."""
        self._resources[uri] = self.keep(schema, original)
        return {"$ref": uri}

    def knows(self, schema: Any) -> bool:
        """Whether a schema is part of the document."""
        return id(schema) in self._bases

    def keep(self, made: dict[str, Any], original: Any) -> dict[str, Any]:
        """Keep a schema that was made from one of the document, which resolves references from the original's place."""
        self._bases[id(made)] = self._bases.get(id(original), "")
        self._kept.append(made)
        return made

    def _at(self, pointer: str, found: Any, base: str) -> Any:
        for step in pointer.split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, Mapping) and step in found:
                found = found[step]
            elif isinstance(found, list) and _INDEX.fullmatch(step) and int(step) < len(found):
                found = found[int(step)]
            else:
                raise IndexError(pointer)
            base = self._bases.get(id(found), base)
        if isinstance(found, dict) and id(found) not in self._bases:  # not where schemas usually stand
            self._enter(found, base)
        return found

    def _enter(self, schema: Any, base: str) -> None:
        """Note the base of a schema and all in it, and what they can be referred to by."""
        waiting = [(schema, base, 0)]
        while waiting:
            schema, base, depth = waiting.pop()
            if not isinstance(schema, dict) or id(schema) in self._bases:
                continue
            if depth > MAX_DEPTH:
                self.too_deep = True
                continue
            own = schema.get("$id") or (schema.get("id") if self._older_ids else None)
            if isinstance(own, str) and own.startswith("#"):  # an anchor, up to draft 7
                self._resources.setdefault(base + own, schema)
            elif isinstance(own, str):
                base = _joined(base, own).partition("#")[0]
                self._resources.setdefault(base, schema)
            if isinstance(anchor := schema.get("$anchor"), str):
                self._resources.setdefault(f"{base}#{anchor}", schema)
            self._bases[id(schema)] = base
            waiting += [(part, base, depth + 1) for part in subschemas(schema)]


def _joined(base: str, reference: str) -> str:
    try:
        return urljoin(base, reference)
    except ValueError:  # no URL
        return reference


def subschemas(schema: Mapping[str, Any]) -> Iterator[Any]:
    """The schemas that stand directly in one."""
    for keyword, value in schema.items():
        if keyword in MAPS and isinstance(value, Mapping):
            yield from value.values()
        elif keyword in LISTS and isinstance(value, list):
            yield from value
        elif keyword in SINGLE:
            yield value
