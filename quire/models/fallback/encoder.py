"""A model that makes vectors or values of whole texts, computed by transformers' own modules."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.compute.attention.backend import AttentionBackend
from quire.compute.attention.metadata import IntArray
from quire.compute.collectives.delta import Stream
from quire.models.fallback.classes import EAGER, arguments_of, build_whole, read_config, set_attention
from quire.models.fallback.products import find_products
from quire.models.fallback.rows_only import RowsOnly
from quire.models.fallback.weights import TransformersWeights
from quire.models.layers.factory import LayerFactory
from quire.models.layers.rotary import Positions
from quire.models.spec import ModelSpec

_SDPA = "sdpa"
"""transformers' name of attention by torch's own function."""
_PRODUCTS = 2**23
"""Maximum products of queries and keys in a batch, for each head, though never fewer than one text's."""
_ALIKE = 16
"""Texts up to this long may be padded to it."""


class FallbackEncoder:
    """DecoderParts of a model that computes whole texts: its only "block" is all of it, with its head.

    Texts of a step are computed in batches of similar lengths, with padding that is masked.

    Args:
        spec: The spec, with its description.
        build: Remembers the weights as one layer.

    Attributes:
        pads: Whether texts of different lengths may be in one batch.
    """

    def __init__(self, spec: ModelSpec, build: LayerFactory) -> None:
        description = spec.fallback
        assert description is not None, "a native model"
        config = read_config(Path(description.directory))
        model, self._head = build_whole(config, [description.architecture], build.options.dtype)
        self._model = model
        self._accepts = arguments_of(model)
        self._padding = config.pad_token_id or 0
        self._attention = _SDPA if getattr(model, "_supports_sdpa", False) else EAGER
        self.pads = "attention_mask" in self._accepts
        self._types = description.token_types
        products = find_products(model, self._run_on_meta) if build.options.device.type == "cpu" else []
        build.remember(TransformersWeights(model, self, build.options, products, leaves_out=not self._head))

    def embed(self, tokens: Tensor, positions: Positions) -> Stream:
        """Return the tokens themselves, which the modules embed."""
        return Stream(tokens, None)

    def blocks(self, stream: Stream, positions: Positions, attention: AttentionBackend) -> Iterator[Stream]:
        """Yield the states of tokens, or the values of the model's head."""
        assert isinstance(attention, RowsOnly)
        assert attention.rows is not None, "the step was not prepared"
        yield Stream(self.outputs(stream.x, attention.rows.counts, positions.types), None)

    def finish(self, stream: Stream) -> Tensor:
        return stream.x

    def logits(self, hidden: Tensor) -> Tensor:
        """Return `hidden`, which are a head's values already if there is a head."""
        return hidden

    def outputs(self, tokens: Tensor, counts: IntArray, types: Tensor | None) -> Tensor:
        """Compute texts that lie one behind the other: tokens [tokens] → [tokens, width].

        Args:
            counts: Tokens of each text.
            types: [tokens], the type of each token; None: all are 0.

        Returns:
            The states of tokens, or the values of a head; one of texts has the same values at all tokens of a text.
        """
        ends = np.cumsum(counts)
        parts, places = [], []
        for batch in self._batches(counts):
            lengths = counts[batch]
            columns = np.arange(lengths[0])
            kept = columns < lengths[:, None]
            place = np.where(kept, (ends[batch] - lengths)[:, None] + columns, 0)
            parts.append(self._compute(tokens, types, place, kept))
            places.append(place[kept])
        order = np.concatenate(places)
        where = np.empty_like(order)
        where[order] = np.arange(len(order))
        return torch.cat(parts).index_select(0, torch.from_numpy(where).to(tokens.device))

    def fuse_attentions(self, dtype: torch.dtype) -> None:
        """Choose how the loaded model attends."""
        set_attention(self._model, self._attention)

    def reference(self, tokens: Tensor, types: Tensor | None) -> Tensor:
        """Compute one text with the model's own eager attention: tokens [tokens] → [tokens, width]."""
        set_attention(self._model, EAGER)
        try:
            whole = np.arange(len(tokens))[None]
            return self._compute(tokens, types, whole, np.ones_like(whole, dtype=bool))
        finally:
            set_attention(self._model, self._attention)

    def _batches(self, counts: IntArray) -> Iterator[IntArray]:
        """Yield the numbers of the texts of each batch, the longest first."""
        order = np.argsort(-counts, kind="stable")
        order = order[counts[order] > 0]
        while len(order):
            longest = int(counts[order[0]])
            shortest = longest if not self.pads else 1 if longest <= _ALIKE else longest * 3 // 4
            alike = int(np.count_nonzero(counts[order] >= shortest))
            taken = max(1, min(alike, _PRODUCTS // longest**2))
            yield order[:taken]
            order = order[taken:]

    def _compute(self, tokens: Tensor, types: Tensor | None, place: IntArray, kept: np.ndarray[Any, Any]) -> Tensor:
        """Compute one batch: texts [texts, longest] of indices of tokens, of which some are `kept` → [kept, width]."""
        device, whole = tokens.device, bool(kept.all())
        indices, mask = torch.from_numpy(place).to(device), torch.from_numpy(kept).to(device)
        ids = tokens[indices]
        inputs: dict[str, Tensor] = {"input_ids": ids if whole else ids.masked_fill(~mask, self._padding)}
        if "attention_mask" in self._accepts:
            inputs["attention_mask"] = mask.long()
        if self._types and "token_type_ids" in self._accepts:
            inputs["token_type_ids"] = torch.zeros_like(ids) if types is None else types[indices]
        output: Any = self._model(**inputs)
        found: Tensor = output.logits if self._head else output[0]
        if self._head == "text":
            return found.repeat_interleave(mask.sum(1), 0)
        return found.flatten(0, 1) if whole else found[mask]

    def _run_on_meta(self) -> None:
        """Compute a few tokens on the meta device, as they are before weights are read."""
        with torch.inference_mode():
            ids = torch.zeros((1, 8), dtype=torch.int64, device="meta")
            self._model(input_ids=ids, attention_mask=torch.ones_like(ids))
