"""Which scheme serves which format: "module:class", made from the format."""

from __future__ import annotations

import importlib
from typing import Any

from quire.models.quantization.dense import Dense
from quire.models.quantization.formats import Format
from quire.models.quantization.scheme import EmbeddingScheme, WeightScheme

SCHEMES: dict[str, str] = {
    "Fp8Format": "quire.models.quantization.scaled:Scaled",
    "Int8Format": "quire.models.quantization.scaled:Scaled",
    "CodebookFormat": "quire.models.quantization.codebook:Codebook",
    "GgufFormat": "quire.models.quantization.gguf:Gguf",
    "GroupFormat": "quire.models.quantization.grouped:Grouped",
}
"""The schemes of linear weights and experts, by the name of the format's class."""


EMBEDDING_SCHEMES = {"GgufFormat": SCHEMES["GgufFormat"]}
"""The schemes of embeddings that are not dense, by the name of the format's class."""


def scheme_of(form: Format | None) -> WeightScheme:
    """Return the scheme for weights of this format; None: dense weights."""
    if form is None:
        return Dense()
    scheme: WeightScheme = _made(SCHEMES[type(form).__name__], form)
    return scheme


def embedding_scheme_of(form: Format | None) -> EmbeddingScheme:
    """Return the scheme for embeddings of this format, which is the dense one for most."""
    name = EMBEDDING_SCHEMES.get(type(form).__name__)
    scheme: EmbeddingScheme = Dense() if name is None else _made(name, form)
    return scheme


def _made(scheme: str, form: Format | None) -> Any:
    module, name = scheme.split(":")
    return getattr(importlib.import_module(module), name)(form)
