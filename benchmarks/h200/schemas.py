"""JSON schemas of realistic size, each different from all others: names, enumerations and limits vary by its number."""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]
_TEXT = (
    "account address amount author balance batch booking branch budget campaign carrier category channel city client "
    "color comment company contact contract country currency customer delivery department deposit description device "
    "discount district document email employee event expense feature file floor folder gender group height history "
    "hotel image index invoice item journey label language latitude length level license location longitude manager "
    "material member message method model month name note number office option order origin owner package page parcel "
    "partner passenger payment phone place plan policy position price priority product profile project property "
    "quantity rating reason receipt record reference region release report request resource result review role room "
    "route salary sample schedule score season seller service session shipment signature size skill source speed stage "
    "status stock store street subject supplier system target task tax team ticket title topic total tracking type "
    "unit user value vehicle vendor version visit volume warehouse weight width year zone"
)
WORDS = _TEXT.split()


def schema(number: int) -> Schema:
    """An object of some ten properties, two of them nested: 1 to 2 kB."""
    choose = random.Random(number)
    names = iter(choose.sample(WORDS, 40))
    properties: dict[str, Schema] = {next(names): leaf(choose) for _ in range(choose.randint(6, 9))}
    properties[next(names)] = record({next(names): leaf(choose) for _ in range(4)})
    items = record({next(names): leaf(choose) for _ in range(3)})
    properties[next(names)] = {"type": "array", "items": items, "minItems": 1, "maxItems": 4}
    properties["kind"] = {"enum": [f"{next(names)}_{number}", next(names), next(names)]}
    return record(properties)


def record(properties: dict[str, Schema]) -> Schema:
    """An object that has exactly these."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def leaf(choose: random.Random) -> Schema:
    """A string, a number or one of a few words."""
    kinds: list[Schema] = [
        {"type": "string", "maxLength": choose.randint(12, 40)},
        {"type": "string", "pattern": r"^[A-Z]{2}-[0-9]{4,8}$"},
        {"type": "string", "format": "date"},
        {"type": "integer", "minimum": 0, "maximum": choose.randint(10, 9_999)},
        {"type": "number"},
        {"type": "boolean"},
        {"enum": choose.sample(WORDS, 5)},
        {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 20}]},
        {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3},
    ]
    return choose.choice(kinds)
