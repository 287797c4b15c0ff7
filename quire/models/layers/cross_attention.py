"""Attention of a decoder's tokens to the states that an encoder has made."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from quire.compute.attention.backend import AttentionBackend
from quire.compute.attention.sources import sources_of
from quire.compute.collectives.delta import Delta
from quire.compute.kernels.reference.attention_inputs import Scores
from quire.compute.kernels.reference.quantized_rows import Rows
from quire.models.layer_spec import CrossSpec
from quire.models.layers.linear import Projection


class CrossAttention:
    """One layer's attention to an encoder's states, whose keys and values are cached.

    Args:
        number: The layer's number.
        spec: Its sizes.
        query: Projects the input to queries.
        out: Projects the output back into the stream.

    Attributes:
        row_form: The form of quantized rows that the layer takes in addition to dense ones; None: dense rows only.
    """

    def __init__(self, number: int, spec: CrossSpec, query: Projection, out: Callable[[Tensor], Delta]) -> None:
        self.row_form = query.row_form
        self._number = number
        self._heads = spec.heads
        self._width = spec.head_dim
        self._scores = Scores(spec.head_dim**-0.5)
        self._query = query
        self._out = out

    def __call__(self, x: Rows, backend: AttentionBackend) -> Delta:
        """Compute attention: [tokens, hidden] → [tokens, hidden]."""
        queries = self._query(x)
        o = queries.new_empty(queries.shape)
        shape = len(queries), self._heads, self._width
        sources_of(backend).attend(self._number, queries.view(shape), self._scores, o.view(shape))
        return self._out(o)
