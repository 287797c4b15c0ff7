"""Which scheme serves which format: "module:class", made from the format."""

from __future__ import annotations

import importlib
from typing import Any

from quire.quantization.dense import Dense
from quire.quantization.formats import Format
from quire.quantization.scheme import EmbeddingScheme, WeightScheme

SCHEMES: dict[str, str] = {
    "Fp8Format": "quire.quantization.scaled:Scaled",
    "Int8Format": "quire.quantization.scaled:Scaled",
    "CodebookFormat": "quire.quantization.codebook:Codebook",
    "GgufFormat": "quire.quantization.gguf:Gguf",
    "GroupFormat": "quire.quantization.grouped:Grouped",
}
"""By the name of the format's class."""


EMBEDDING_SCHEMES = {"GgufFormat": SCHEMES["GgufFormat"]}
"""The same of embeddings, where they are not dense."""


def scheme_of(form: Format | None) -> WeightScheme:
    """What serves weights of this format; None: dense ones."""
    if form is None:
        return Dense()
    scheme: WeightScheme = _made(SCHEMES[type(form).__name__], form)
    return scheme


def embedding_scheme_of(form: Format | None) -> EmbeddingScheme:
    """What serves embeddings of this format: of most, dense ones."""
    name = EMBEDDING_SCHEMES.get(type(form).__name__)
    scheme: EmbeddingScheme = Dense() if name is None else _made(name, form)
    return scheme


def _made(scheme: str, form: Format | None) -> Any:
    module, name = scheme.split(":")
    return getattr(importlib.import_module(module), name)(form)
