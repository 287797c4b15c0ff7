"""How long a whole step takes, row by row: the roofline's terms, each with the share of it that real steps reach.

The scheduler's `Roofline` wants two numbers, the time of decoding rows and that of one more token, and learns the rest
from the steps it sees. A planner sees no steps, so here the same terms have shares that were fitted to measured steps,
once for a kind of device. The scheduler does not use them: they would change how prompts are cut on devices that nobody
has measured, and learning corrects it anyway.

Reading weights and multiplying with them overlap, but not wholly: their sum in the p-norm is between the larger one
(perfect overlap, the roofline) and both together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quire.foundation.config.cache import element_bytes
from quire.models.spec import DTYPE_BYTES, ModelSpec
from quire.planning.costmodel.hardware import Hardware
from quire.planning.costmodel.step_work import IntArray, UsedWeights, attended, attention_of, seen


@dataclass(frozen=True)
class Shares:
    """Which shares of a `Hardware`'s figures real steps reach, and how long steps take besides.

    Attributes:
        products: The share of operations a second, in products with weights.
        expert_products: The share of operations a second, in products of experts, whose tiles are seldom full.
        scores: The share of operations a second, in attention of chunks.
        weights: The share of bandwidth when reading weights for more than one token; one token reaches all of it.
        kv_cache: The share of bandwidth when reading keys and values for decoding rows.
        overlap: The exponent p: 1 is no overlap, infinity is perfect.
        layer_ms: What a layer takes, however little it does.
        experts_ms: What a layer's experts take on top, however little they do.
        row_ms: What each sampled row takes.
        request_ms: What the host takes from a request's arrival to its first step and back, in one process.
        server_ms: What the HTTP API takes for a request on top.
    """

    products: float
    expert_products: float
    scores: float
    weights: float
    kv_cache: float
    overlap: float
    layer_ms: float
    experts_ms: float
    row_ms: float
    request_ms: float
    server_ms: float


class StepTime:
    """Predicts steps of one model, or of a rank's share of it, on one device. Products of quantized weights are
    `faster_products` times as fast; ranks take `extra_ms` to exchange tensors in any step: a constant, and a time for
    each token."""

    def __init__(
        self,
        spec: ModelSpec,
        dtype: str,
        hardware: Hardware,
        kv_dtype: str,
        shares: Shares,
        faster_products: float = 1.0,
        extra_ms: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        used = UsedWeights(spec)
        self._used, self._shares, self._extra_ms = used, shares, extra_ms
        self._byte_ms = 1e3 / hardware.bandwidth
        self._weight_bytes = used.mean_bytes(dtype)
        flop_ms = 1e3 / hardware.flops
        self._head_ms = 2 * used.head * flop_ms / shares.products
        self._dense_ms = 2 * used.dense_per_token * flop_ms / shares.products / faster_products
        self._expert_ms = 2 * used.experts_per_token * flop_ms / shares.expert_products / faster_products
        self._score_ms = flop_ms / shares.scores
        self._kv_ms = element_bytes(kv_dtype, DTYPE_BYTES) * self._byte_ms / shares.kv_cache
        self._attention = attention_of(spec)
        layers_ms = len(spec.layers) * shares.layer_ms + spec.layers_with_experts * shares.experts_ms
        self._fixed_ms = hardware.overhead_ms + layers_ms

    def __call__(self, counts: IntArray, before: IntArray, sampled: int) -> float:
        """Return the milliseconds of a step in which rows have `counts` [rows] int64 tokens behind contexts of `before`
        [rows] int64 tokens, and `sampled` rows sample a token."""
        tokens = int(counts.sum())
        reads, scores = attended(counts, before, self._attention)
        attention = reads * self._kv_ms + scores * self._score_ms
        return self._fixed(tokens, sampled) + self.products_ms(tokens, sampled) + attention

    def decode(self, rows: int, context: float) -> float:
        """Milliseconds of a step in which so many rows decode, with `context` tokens each."""
        return self.mixed(rows, context, 0, 0)

    def mixed(self, rows: int, context: float, chunk: int, before: int) -> float:
        """Milliseconds of a step in which rows decode, with `context` tokens each, and a chunk of a prompt is computed,
        with `before` tokens of the prompt before it."""
        fixed, attention = self._fixed(rows + chunk, rows), 0.0
        for own in self._attention:
            attention += own.read * rows * seen(context + 1, own.window) * self._kv_ms
            attention += own.scored * chunk * seen(before + chunk / 2, own.window) * self._score_ms
        return fixed + self.products_ms(rows + chunk, rows) + attention

    def verification(self, rows: int, context: float, drafts: int) -> float:
        """Milliseconds of a step in which rows with `context` tokens each verify `drafts` drafts. All tokens are
        sampled, and a row's tokens together read its context once."""
        each, attention = 1 + drafts, 0.0
        for own in self._attention:
            read = seen(context + each, own.window)
            attention += rows * max(own.read * read * self._kv_ms, own.scored * each * read * self._score_ms)
        tokens = rows * each
        return self._fixed(tokens, tokens) + self.products_ms(tokens, tokens) + attention

    def prompt(self, tokens: int, before: int = 0) -> float:
        """Milliseconds of a step that computes a prompt behind `before` cached tokens and samples its first token."""
        return self(np.array([tokens], np.int64), np.array([before], np.int64), 1)

    def products_ms(self, tokens: int, sampled: int) -> float:
        """Milliseconds of reading weights and multiplying with them."""
        share = 1.0 if tokens == 1 else self._shares.weights
        read = self._used.read(tokens) * self._weight_bytes * self._byte_ms / share
        product = tokens * (self._dense_ms + self._expert_ms) + sampled * self._head_ms
        p = self._shares.overlap
        return float((read**p + product**p) ** (1 / p))

    def _fixed(self, tokens: int, sampled: int) -> float:
        constant, each = self._extra_ms
        return self._fixed_ms + sampled * self._shares.row_ms + constant + tokens * each
