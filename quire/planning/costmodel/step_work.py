"""What a step of a model does, for all predictions of times: reading and multiplying weights, and attention."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quire.models.layer_spec import AttentionSpec
from quire.models.spec import DTYPE_BYTES, ModelSpec

IntArray = npt.NDArray[np.int64]


Windows = Mapping[int | None, int]
"""How many layers look back so many tokens; None looks back to the beginning."""


class Attended(NamedTuple):
    """Attention of the layers that look back equally far, all of them together.

    Attributes:
        window: How many tokens they look back; None for all.
        read: What counts for each position that a row reads: elements of the KV cache, or layers.
        scored: What counts for each pair of a query and a position that it sees: operations, or layers.
    """

    window: int | None
    read: int
    scored: int


class UsedWeights:
    """How many of a model's weights a step uses. An embedding table that is only looked up costs nothing."""

    def __init__(self, spec: ModelSpec) -> None:
        self.head = -(-spec.vocab_size // spec.tp) * spec.hidden
        experts, looked_up = spec.mixture, 0 if spec.tie_embeddings else self.head
        self._count, self._chosen = (experts.count, experts.chosen) if experts else (1, 0)
        self._each = experts.expert_weights * spec.layers_with_experts if experts else 0  # over all layers
        self._spec, self._looked_up = spec, looked_up
        self._always = spec.num_parameters - self._count * self._each - looked_up

    @property
    def per_token(self) -> int:
        """How many weights each token is multiplied with."""
        return self._always + self._chosen * self._each

    @property
    def dense_per_token(self) -> int:
        """How many weights each token is multiplied with, without experts, and without the head of sampled tokens."""
        return self._always - self.head

    @property
    def experts_per_token(self) -> int:
        return self._chosen * self._each

    def mean_bytes(self, dtype: str) -> float:
        """The mean bytes of a weight, without weights that are only looked up: these are never quantized."""
        spec, looked_up = self._spec, self._looked_up
        return (spec.weight_bytes(dtype) - looked_up * DTYPE_BYTES[dtype]) / (spec.num_parameters - looked_up)

    def read(self, tokens: int) -> float:
        """How many weights are read on average for so many tokens. All experts of a layer are equally probable, so a
        token does not use a given expert with probability 1 - chosen / count."""
        touched = self._count * (1 - (1 - self._chosen / self._count) ** tokens)
        return self._always + touched * self._each


def attention_of(spec: ModelSpec) -> list[Attended]:
    """The attention of all layers, by how far back they look: elements read and operations."""
    by_window: dict[int | None, list[AttentionSpec]] = {}
    for layer in spec.layers:
        by_window.setdefault(layer.mixer.window, []).append(layer.mixer)
    return [
        Attended(window, sum(each.cached_elements for each in own), sum(each.score_flops for each in own))
        for window, own in by_window.items()
    ]


def windows_of(spec: ModelSpec) -> dict[int | None, int]:
    """Layers by how far back they look."""
    return dict(Counter(layer.mixer.window for layer in spec.layers))


def seen(context: float, window: int | None) -> float:
    """Tokens of a context that a layer with this window sees."""
    return context if window is None else min(context, window)


def attended(counts: IntArray, before: IntArray, attention: Sequence[Attended]) -> tuple[float, float]:
    """Return what decoding rows read, and what chunks score, over all layers. `counts` [rows] int64 are the tokens of
    each row, of which a row of one token decodes; `before` [rows] int64 are the tokens of each row's context before
    these."""
    decoding = counts == 1
    contexts, chunks, cached = before[decoding] + 1, counts[~decoding], before[~decoding]
    mean, reads, scores = cached + chunks / 2, 0.0, 0.0
    for own in attention:
        limit = np.inf if own.window is None else own.window
        reads += own.read * float(np.minimum(contexts, limit).sum())
        scores += own.scored * float((chunks * np.minimum(mean, limit)).sum())
    return reads, scores
