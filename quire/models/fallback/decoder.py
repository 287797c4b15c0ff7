"""A decoder that transformers' own modules compute, with its weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from quire.compute.attention.backend import AttentionBackend
from quire.compute.collectives.delta import Stream
from quire.errors import CheckpointError
from quire.models.fallback.attentions import fuse_attentions
from quire.models.fallback.classes import (
    EAGER,
    EXPERTS,
    arguments_of,
    build_text_on_meta,
    find_class,
    read_config,
    sees_images,
    set_attention,
    set_experts,
)
from quire.models.fallback.halves import Halves
from quire.models.fallback.own_caches import OwnCaches
from quire.models.fallback.paged import PAGED, PagedAttention
from quire.models.fallback.products import find_products
from quire.models.fallback.rows_only import RowsOnly
from quire.models.fallback.weights import TransformersWeights
from quire.models.layers.factory import LayerFactory
from quire.models.layers.rotary import Positions
from quire.models.spec import ModelSpec
from quire.models.vision.module_spec import ModuleVisionSpec


class FallbackDecoder:
    """DecoderParts of a model that transformers computes as a whole: its only "block" is all of it.

    Args:
        spec: The spec, with its description.
        build: Remembers the weights as one layer.
    """

    def __init__(self, spec: ModelSpec, build: LayerFactory) -> None:
        description = spec.fallback
        assert description is not None, "a native model"
        config = read_config(Path(description.directory))
        kind = find_class(config, [description.architecture])
        assert kind is not None, "described as a causal language model"
        model = build_text_on_meta(kind, config, build.options.dtype)
        self._added: tuple[Tensor, Sequence[Tensor]] | None = None
        self._model, self._sees = model, spec.vision is not None
        self._tells_rows = isinstance(spec.vision, ModuleVisionSpec) and spec.vision.merge > 0
        self._longest, self._vocabulary = spec.max_model_len, spec.vocab_size
        self._halves = Halves(model, description.is_separate)
        if isinstance(spec.vision, ModuleVisionSpec) and spec.vision.deep:
            layers = _layers_with_vectors(model)
            for number, layer in enumerate(spec.vision.deep):
                layers[layer].register_forward_pre_hook(partial(self._add_vectors, number))
        products = find_products(model, self._run_on_meta) if build.options.device.type == "cpu" else []
        others = sees_images(kind)
        build.remember(TransformersWeights(model, self, build.options, products, leaves_out=others))
        self._paged = PagedAttention(model, description) if description.tier == "paged" else None
        self.own = None if self._paged else OwnCaches(self._halves)

    def embed(self, tokens: Tensor, positions: Positions) -> Stream:
        """Return the tokens themselves, which the modules embed, or their embeddings, of which images replace some."""
        if not self._sees:
            return Stream(tokens, None)
        table: Any = self._model.get_input_embeddings()
        return Stream(table(tokens), None)

    def blocks(self, stream: Stream, positions: Positions, attention: AttentionBackend) -> Iterator[Stream]:
        """Yield the hidden states that the head reads."""
        if self._paged is not None:
            self._paged.begin(attention)
            own = positions.own if positions.lengths is None else positions.lengths
            ids = own[None] if positions.axes is None else positions.axes[:, None]
            inputs = {"position_ids": ids, "use_cache": False}
            yield Stream(self._halves.hidden(stream.x, **inputs)[0], None)
        else:
            assert self.own is not None
            assert isinstance(attention, RowsOnly)
            axes = None
            if self._tells_rows:
                axes = positions.axes if positions.axes is not None else positions.lengths
                axes = None if axes is None else axes.expand(3, -1)
            yield Stream(self.own.hidden(stream.x, attention, axes), None)

    def with_vectors(self, blocks: Iterator[Stream], places: Tensor, deep: Sequence[Tensor]) -> Iterator[Stream]:
        """Yield what `blocks` yields, with vectors [images' tokens, hidden] added to what some layers read."""
        self._added = places, deep
        try:
            yield from blocks
        finally:
            self._added = None

    def _add_vectors(self, number: int, _layer: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Return what a layer reads, with the vectors of this number; None: there are none."""
        if self._added is None:
            return None
        places, deep = self._added
        return (inputs[0].index_add(1, places, deep[number][None]), *inputs[1:])

    def finish(self, stream: Stream) -> Tensor:
        return stream.x

    def logits(self, hidden: Tensor) -> Tensor:
        return self._halves.logits(hidden)

    def _run_on_meta(self) -> None:
        """Compute a few tokens on the meta device, as they are before weights are read."""
        set_experts(self._model, "batched_mm")
        try:
            with torch.inference_mode():
                tokens = torch.zeros(8, dtype=torch.int64, device="meta")
                self._halves.logits(self._halves.hidden(tokens)[0])
        finally:
            set_experts(self._model, EXPERTS)

    def fuse_attentions(self, dtype: torch.dtype) -> None:
        """Let Quire's kernels compute whole attention modules of the loaded model, where they compute the same."""
        if self._paged is None:
            return
        positions = torch.tensor([[0, 1, 2, 3, 5, *(self._longest * part // 8 - 1 for part in (2, 5, 8))]])
        tokens = torch.arange(positions.shape[1]) % self._vocabulary
        inputs = {"position_ids": positions.clamp(min=0), "use_cache": False}
        number = fuse_attentions(self._model, self._paged, dtype, lambda: self._halves.hidden(tokens, **inputs))
        self._paged.fuses = number > 0

    def unfuse_attentions(self) -> bool:
        """Let transformers' own attention modules compute again. Returns whether any were fused."""
        was_fused = self._paged is not None and self._paged.fuses
        if self._paged is not None:
            self._paged.fuses = False
        return was_fused

    def reference(self, tokens: Tensor) -> Tensor:
        """Compute a whole sequence with the model's own eager attention: tokens [tokens] → logits [tokens, vocab]."""
        set_attention(self._model, EAGER)
        if self._paged is not None:
            self._paged.begin(None)
        try:
            without = {"use_cache": False} if "use_cache" in arguments_of(self._model) else {}
            output: Any = self._model(input_ids=tokens[None], **without)
            logits: Tensor = output.logits[0]
        finally:
            if self._paged is not None:
                set_attention(self._model, PAGED)
        return logits


def _layers_with_vectors(model: PreTrainedModel) -> Any:
    """Return the layers of a text model that adds vectors of images to what some of them read (DeepStack).

    Raises:
        CheckpointError: It adds them in its own way, or adds none.
    """
    text: Any = model.get_decoder()  # type: ignore[no-untyped-call]
    adds = hasattr(text, "_deepstack_process") or "deepstack_features" in arguments_of(text)
    if not adds or not hasattr(text, "layers"):
        raise CheckpointError(
            f"{type(text).__name__} adds vectors of images to its layers in its own way, which is not built: "
            "--language-model-only serves its text model."
        )
    return text.layers
