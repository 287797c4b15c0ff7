"""How a flag's value is written: 4k for integers, JSON for dictionaries, words or a JSON list for lists.

Brings the rules of `quire.foundation.config.values` to tyro.
"""

from __future__ import annotations

import json
from typing import Any

from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from quire.foundation.config.values import is_readable, metavar, read_value


def registry() -> ConstructorRegistry:
    """The rules, for `tyro.cli`."""
    rules = ConstructorRegistry()
    rules.primitive_rule(_rule)
    return rules


def _rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    kind = info.type
    if kind is bool or not is_readable(kind):
        return None  # bool: a flag without a value
    if kind == tuple[str, ...]:
        return PrimitiveConstructorSpec(
            nargs="*", metavar=metavar(kind), instance_from_str=lambda words: read_value(kind, words),
            is_instance=lambda value: True, str_from_instance=lambda value: list(value or ()),
        )  # fmt: skip
    return PrimitiveConstructorSpec(
        nargs=1, metavar=metavar(kind), instance_from_str=lambda words: read_value(kind, words[0]),
        is_instance=lambda value: True, str_from_instance=lambda value: [_written(value)],
    )  # fmt: skip


def _written(value: Any) -> str:
    """A value as the help shows it."""
    return json.dumps(value) if isinstance(value, dict) else str(value)
