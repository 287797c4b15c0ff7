"""Makes vectors and values of whole texts from the hidden states of a step.

A text may come in chunks. What is pooled of it so far is kept for its slot, in float32: sums, maxima, or the first
token's state. All rows of a step are pooled together, and their vectors are copied to the host behind the step, so that
nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from quire.compute.attention.metadata import IntArray
from quire.foundation.messages.workers import Plan, PooledRow, Vector
from quire.models.layers.vector_modules import VectorModules, normalized
from quire.models.model import Model
from quire.models.pooler_config import PoolerSpec
from quire.models.sentence_files import Mode
from quire.models.weights.tensor_options import TensorOptions
from quire.pooling_params import PoolingParams
from quire.runtime.worker.host_batch import HostBatch
from quire.runtime.worker.host_memory import upload
from quire.runtime.worker.sampling.sampled_outputs import UNSOUND_TEXT
from quire.runtime.worker.token_values import reduce_values

Vectors = Callable[[], list[Vector]]
"""Collects launched vectors once the device is done: one for each pooled row."""
Launched = tuple[list[int], Tensor]
"""Indices of pooled rows, and their vectors on their way to the host: [rows, dim], or [tokens, dim] of one row."""
_SUMS: tuple[Mode, ...] = ("mean", "mean_sqrt_len")
_FORMS = ("embed", "token_embed")
_LOGITS = 2**24
"""Maximum logits that are computed at a time, though never fewer than one row."""


@dataclass(frozen=True)
class _Rows:
    """The rows of a step whose texts have one vector each, as columns on the host.

    Attributes:
        rows: [n], as the plan has them.
        slots: [n], the slot of each row.
        firsts: [n], index of each row's first pooled token in the step.
        counts: [n], pooled tokens of each row.
        totals: [n], pooled tokens of the text up to and with the row.
        lasts: [n], index of each row's last token in the step.
    """

    rows: list[PooledRow]
    slots: IntArray
    firsts: IntArray
    counts: IntArray
    totals: IntArray
    lasts: IntArray

    @property
    def goes_on(self) -> IntArray:
        """Places of rows whose text has begun in an earlier step."""
        return np.flatnonzero(self.totals > self.counts)

    @property
    def unfinished(self) -> IntArray:
        """Places of rows whose text goes on in a later step."""
        return np.flatnonzero([not row.is_last for row in self.rows])

    @property
    def weight_sums(self) -> IntArray:
        """[n], sums of the weights of all pooled tokens of the text so far: their positions, from 1 on."""
        ends = np.array([row.start + row.skip + row.count for row in self.rows], dtype=np.int64)
        before = ends - self.totals
        sums: IntArray = (ends * (ends + 1) - before * (before + 1)) // 2
        return sums

    def tokens(self) -> IntArray:
        """Indices of all pooled tokens, row by row."""
        before: IntArray = np.cumsum(self.counts, dtype=np.int64) - self.counts
        starts = np.repeat(self.firsts - before, self.counts)
        return starts + np.arange(len(starts), dtype=np.int64)

    def weights(self) -> IntArray:
        """The position of each of `tokens` in its text, from 1 on."""
        starts = np.array([row.start + row.skip for row in self.rows], dtype=np.int64)
        return self.tokens() + np.repeat(starts - self.firsts, self.counts) + 1


class Pooler:
    """Pools the states of texts by `spec`, and computes embeddings, or values by the model's head.

    Args:
        width: Width of the model's states.
        slots: Number of slots.
        vocab_size: Width of logits.
        modules: What makes the embedding of a pooled vector.
    """

    def __init__(
        self, spec: PoolerSpec, model: Model, modules: VectorModules, width: int, slots: int,
        vocab_size: int, options: TensorOptions,
    ) -> None:  # fmt: skip
        self._spec = spec
        self._model = model
        self._modules = modules
        self._device = device = options.device
        self._dtype = options.dtype
        has_labels = bool(spec.labels) and not spec.score_tokens
        self._logits_at_once = max(1, _LOGITS // (len(spec.labels) if has_labels else vocab_size))
        self._params: dict[int, PoolingParams] = {}  # by slot
        kept: dict[str, Mode] = {_kind(mode): mode for mode in spec.modes if mode != "last"}
        self._kept = {kind: torch.zeros((slots, width), dtype=torch.float32, device=device) for kind in kept}
        self._score_tokens = upload(list(spec.score_tokens), device) if spec.score_tokens else None

    def launch(self, plan: Plan, host: HostBatch, hidden: Tensor) -> Vectors:
        """Launch the vectors of `plan.pooled_rows` from states `hidden` [tokens, width], and their copy to the host."""
        for owner in plan.admitted:
            if owner.pooling is not None:
                self._params[owner.slot] = owner.pooling
        params = [self._params[plan.slots[row.row]] for row in plan.pooled_rows]
        launched = self._launch_texts(plan, host, params, hidden)
        for place, (row, each) in enumerate(zip(plan.pooled_rows, params, strict=True)):
            if each.per_token:
                first = int(host.first_tokens[row.row])
                states = hidden[first : first + int(host.counts[row.row])]
                ids = host.token_ids[first : first + len(states)]
                launched.append(([place], self._of_tokens(states, ids, each).to("cpu", non_blocking=True)))
        return partial(_collect, launched, params)

    def warm_up(self, hidden: Tensor, rows: int) -> None:
        """Take the maximum memory of a step: one text of all of `hidden`, and as many texts as `rows`."""
        states = hidden.float()
        pooled = torch.cat([states[:rows]] * len(self._spec.modes), dim=1) if self._spec.modes else states[:0]
        if (values := self._spec.token_values) is not None:
            whole = reduce_values(hidden, np.array([len(hidden)]), self._values, values, self._logits_at_once)
            pooled = whole.repeat(min(rows, len(hidden)), 1)
        for task in self._spec.tasks:
            params = PoolingParams(task=task)
            if params.per_token:
                self._of_tokens(hidden, np.zeros(len(hidden), dtype=np.int64), params)
            else:
                self._finished(pooled, params)

    # --- whole texts --------------------------------------------------------------------------------------------------

    def _launch_texts(
        self, plan: Plan, host: HostBatch, params: Sequence[PoolingParams], hidden: Tensor
    ) -> list[Launched]:
        """Pool all rows of texts with one vector, and finish those that end a text, together with others that ask for
        the same."""
        places = [place for place, each in enumerate(params) if not each.per_token]
        if not places:
            return []
        rows = _rows_of([plan.pooled_rows[place] for place in places], plan, host)
        if (values := self._spec.token_values) is None:
            pooled = self._pooled(rows, hidden)
        else:
            pooled = reduce_values(
                self._states_of(rows, hidden), rows.counts, self._values, values, self._logits_at_once
            )
        alike: dict[object, list[int]] = {}
        for number, (row, place) in enumerate(zip(rows.rows, places, strict=True)):
            if row.is_last:
                each = params[place]
                alike.setdefault((each.task, each.dimensions, each.use_activation), []).append(number)
        launched = []
        for numbers in alike.values():
            chosen = pooled if len(numbers) == len(places) else pooled.index_select(0, upload(numbers, self._device))
            vectors = self._finished(chosen, params[places[numbers[0]]])
            launched.append(([places[number] for number in numbers], vectors.to("cpu", non_blocking=True)))
        return launched

    def _pooled(self, rows: _Rows, hidden: Tensor) -> Tensor:
        """Pool each row with what is kept of its text: [tokens, width] → [rows, modes · width] fp32."""
        kinds: dict[str, Tensor] = {}
        parts = []
        for mode in self._spec.modes:
            kind = _kind(mode)
            if kind not in kinds:
                kinds[kind] = self._joined(kind, self._of_kind(kind, rows, hidden), rows)
            parts.append(self._divided(mode, kinds[kind], rows))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _of_kind(self, kind: str, rows: _Rows, hidden: Tensor) -> Tensor:
        """Pool each row by itself: [tokens, width] → [rows, width] fp32."""
        if kind == "last":
            return hidden.index_select(0, upload(rows.lasts, self._device)).float()
        if kind == "cls":
            return hidden.index_select(0, upload(np.minimum(rows.firsts, rows.lasts), self._device)).float()
        states, lengths = self._states_of(rows, hidden).float(), upload(rows.counts, self._device)
        if kind == "weighted":
            states = states * upload(rows.weights(), self._device).unsqueeze(1)
        reduced: Tensor
        if kind == "max":
            reduced = torch.segment_reduce(states, "max", lengths=lengths, unsafe=True, initial=float("-inf"))
        else:
            reduced = torch.segment_reduce(states, "sum", lengths=lengths, unsafe=True, initial=0.0)
        return reduced

    def _states_of(self, rows: _Rows, hidden: Tensor) -> Tensor:
        """Return the states of all pooled tokens, row by row."""
        tokens = rows.tokens()
        return hidden if len(tokens) == len(hidden) else hidden.index_select(0, upload(tokens, self._device))

    def _joined(self, kind: str, values: Tensor, rows: _Rows) -> Tensor:
        """Join the rows' values [rows, width] with what is kept of their texts, and keep that of texts that go on."""
        if kind == "last":
            return values
        kept = self._kept[kind]
        if len(goes_on := rows.goes_on):
            places, slots = upload(goes_on, self._device), upload(rows.slots[goes_on], self._device)
            before, own = kept.index_select(0, slots), values.index_select(0, places)
            joined = before if kind == "cls" else torch.maximum(before, own) if kind == "max" else before + own
            values = values.index_copy(0, places, joined)
        if len(unfinished := rows.unfinished):
            places, slots = upload(unfinished, self._device), upload(rows.slots[unfinished], self._device)
            kept.index_copy_(0, slots, values.index_select(0, places))
        return values

    def _divided(self, mode: Mode, values: Tensor, rows: _Rows) -> Tensor:
        if mode not in (*_SUMS, "weighted_mean"):
            return values
        divisors = rows.weight_sums if mode == "weighted_mean" else rows.totals
        if mode == "mean_sqrt_len":
            divisors = np.sqrt(divisors)
        return values / upload(np.maximum(divisors, 1e-9), self._device, torch.float32).unsqueeze(1)

    def _finished(self, pooled: Tensor, params: PoolingParams) -> Tensor:
        """Compute embeddings or values of pooled vectors [texts, modes · width] fp32 → [texts, dim] fp32."""
        if params.task in _FORMS:
            return self._embedded(self._modules(pooled), params)
        values = pooled if self._spec.token_values is not None else self._values(pooled.to(self._dtype))
        return self._activated(values, params)

    # --- tokens -------------------------------------------------------------------------------------------------------

    def _of_tokens(self, states: Tensor, ids: IntArray, params: PoolingParams) -> Tensor:
        """Compute embeddings or values of tokens: states [tokens, width] → [chosen tokens, dim] fp32."""
        if params.task in _FORMS:
            vectors = self._values(states) if self._spec.vectors_of_head else self._modules(states.float())
            return self._embedded(vectors, params)
        tag = self._spec.step_tag_id if params.step_tag_id is None else params.step_tag_id
        if tag is not None:
            states = states.index_select(0, upload(np.flatnonzero(ids == tag), self._device))
        values = self._activated(self._values(states), params)
        returned = params.returned_token_ids or self._spec.returned_token_ids
        return values if returned is None else values.index_select(1, upload(list(returned), self._device))

    # --- both ---------------------------------------------------------------------------------------------------------

    def _embedded(self, x: Tensor, params: PoolingParams) -> Tensor:
        x = x[:, : params.dimensions or self._spec.dim]
        normalizes = self._spec.normalizes if params.use_activation is None else params.use_activation
        return normalized(x) if normalizes else x

    def _values(self, states: Tensor) -> Tensor:
        """Compute the head's values of states: [n, width] → [n, labels] fp32."""
        if self._score_tokens is None:
            return self._model.logits(states).float()
        values = [
            self._model.logits(some).index_select(1, self._score_tokens).float()
            for some in torch.split(states, self._logits_at_once)
        ]
        scores = torch.cat(values) if values else states.new_empty((0, len(self._score_tokens)), dtype=torch.float32)
        return scores[:, -1:] - scores[:, :1] if self._spec.is_difference else scores

    def _activated(self, values: Tensor, params: PoolingParams) -> Tensor:
        if self._spec.logit_mean or self._spec.logit_sigma != 1.0:
            values = (values - self._spec.logit_mean) / self._spec.logit_sigma
        activates = self._spec.activates if params.use_activation is None else params.use_activation
        if not activates or not self._spec.activation:
            return values
        return torch.sigmoid(values) if self._spec.activation == "sigmoid" else torch.softmax(values, dim=-1)


def _kind(mode: Mode) -> str:
    """Return what is kept of a text for a mode."""
    return "sum" if mode in _SUMS else "weighted" if mode == "weighted_mean" else mode


def _rows_of(rows: list[PooledRow], plan: Plan, host: HostBatch) -> _Rows:
    numbers = [row.row for row in rows]
    first_tokens, counts = host.first_tokens[numbers], host.counts[numbers]
    return _Rows(
        rows=rows,
        slots=host.slots[numbers],
        firsts=first_tokens + np.array([row.skip for row in rows], dtype=np.int64),
        counts=np.array([row.count for row in rows], dtype=np.int64),
        totals=np.array([row.total for row in rows], dtype=np.int64),
        lasts=first_tokens + counts - 1,
    )


def _collect(launched: Sequence[Launched], params: Sequence[PoolingParams]) -> list[Vector]:
    """Return a vector for each pooled row; the device is done."""
    vectors = [Vector()] * len(params)
    for places, tensor in launched:
        values = tensor.numpy()
        for place, own in zip(places, [values] if params[places[0]].per_token else values, strict=True):
            sound = bool(np.isfinite(own).all())
            vectors[place] = Vector(own.tobytes(), list(own.shape)) if sound else Vector(error=UNSOUND_TEXT)
    return vectors
