"""What a step of a model does, for all predictions of times: reading and multiplying weights, and attention."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quire.models.layer_spec import LayerSpec, Mixer
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
        experts, looked_up = spec.mixture, spec.looked_up_weights
        own, self._engines = (experts.own, experts.engines) if experts else (1, 1)
        self._own, self._share = own, experts.chosen / experts.count if experts else 0.0
        self._each = experts.expert_weights * spec.layers_with_experts if experts else 0  # over all layers
        self._spec, self._looked_up = spec, looked_up
        self._always = spec.num_parameters - own * self._each - looked_up

    @property
    def per_token(self) -> float:
        """How many weights each token is multiplied with."""
        return self._always + self.experts_per_token

    @property
    def dense_per_token(self) -> int:
        """How many weights each token is multiplied with, without experts, and without the head of sampled tokens."""
        return self._always - self.head

    @property
    def experts_per_token(self) -> float:
        """How many weights of experts each token is multiplied with on average.

        On a rank with some of the experts, tokens of all engines go to these. Engines have equally many.
        """
        return self._engines * self._own * self._share * self._each

    def mean_bytes(self, dtype: str) -> float:
        """The mean bytes of a weight, without weights that are only looked up: these are never quantized."""
        spec, looked_up = self._spec, self._looked_up
        return (spec.weight_bytes(dtype) - looked_up * DTYPE_BYTES[dtype]) / (spec.num_parameters - looked_up)

    def read(self, tokens: int) -> float:
        """How many weights are read on average for so many tokens of this engine. All experts of a layer are equally
        probable, so a token does not use a given expert with probability 1 - chosen / count.
        """
        touched = self._own * (1 - (1 - self._share) ** (tokens * self._engines))
        return self._always + touched * self._each


def attention_of(spec: ModelSpec) -> list[Attended]:
    """The attention of all layers, by how far back they look: elements read and operations. A state is read and written
    whole, as if it were one token that is looked back to."""
    by_window: dict[int | None, list[Mixer]] = {}
    for layer in _with_cache(spec):
        by_window.setdefault(layer.mixer.reach.length, []).append(layer.mixer)
    attention = [
        Attended(window, sum(each.read_width for each in own), sum(each.score_flops for each in own))
        for window, own in by_window.items()
    ]
    states = 2 * spec.state_bytes(spec.dtype) // DTYPE_BYTES[spec.dtype]
    return [*attention, Attended(1, states, 0)] if states else attention


def windows_of(spec: ModelSpec) -> dict[int | None, int]:
    """Layers by how far back they look."""
    return dict(Counter(layer.mixer.reach.length for layer in _with_cache(spec)))


def _with_cache(spec: ModelSpec) -> list[LayerSpec]:
    """Return the layers that cache anything of tokens."""
    return [layer for layer in spec.layers if layer.mixer.form.planes]


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
