"""Which scheme serves which format."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from quire.models.quantization.codebook import CodebookLinearWeight
from quire.models.quantization.coded_experts import CodedScheme
from quire.models.quantization.dense import Dense
from quire.models.quantization.formats import CodebookFormat, Format, Fp8Format, GgufFormat, GroupFormat, Int8Format
from quire.models.quantization.gguf import Gguf
from quire.models.quantization.grouped import GroupedLinearWeight
from quire.models.quantization.scaled import ScaledLinearWeight
from quire.models.quantization.scheme import EmbeddingScheme, WeightScheme

SCHEMES: dict[type[Format], Callable[[Any], WeightScheme]] = {
    Fp8Format: partial(CodedScheme, ScaledLinearWeight),
    Int8Format: partial(CodedScheme, ScaledLinearWeight),
    CodebookFormat: partial(CodedScheme, CodebookLinearWeight),
    GroupFormat: partial(CodedScheme, GroupedLinearWeight),
    GgufFormat: Gguf,
}
"""What makes the scheme of linear weights and experts from a format."""


def scheme_of(form: Format | None) -> WeightScheme:
    """Return the scheme for weights of this format; None: dense weights."""
    return Dense() if form is None else SCHEMES[type(form)](form)


def embedding_scheme_of(form: Format | None) -> EmbeddingScheme:
    """Return the scheme for embeddings of this format: all but GGUF's are dense."""
    return Gguf(form) if isinstance(form, GgufFormat) else Dense()
