"""Which scheme serves which format: "module:class", made from the format."""

from __future__ import annotations

import importlib

from quire.quantization.dense import Dense
from quire.quantization.formats import Format
from quire.quantization.scheme import WeightScheme

SCHEMES: dict[str, str] = {
    "Fp8Format": "quire.quantization.scaled:Scaled",
    "Int8Format": "quire.quantization.scaled:Scaled",
    "GroupFormat": "quire.quantization.grouped:Grouped",
}
"""By the name of the format's class."""


def scheme_of(form: Format | None) -> WeightScheme:
    """What serves weights of this format; None: dense ones."""
    if form is None:
        return Dense()
    module, name = SCHEMES[type(form).__name__].split(":")
    scheme: WeightScheme = getattr(importlib.import_module(module), name)(form)
    return scheme
