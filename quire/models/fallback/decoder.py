"""A decoder that transformers' own modules compute, with its weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import logging

from quire.compute.attention.backend import AttentionBackend
from quire.compute.collectives.delta import Stream
from quire.errors import CheckpointError
from quire.models.fallback.classes import (
    EAGER,
    EXPERTS,
    arguments_of,
    build_on_meta,
    find_class,
    read_config,
    set_attention,
    set_experts,
)
from quire.models.fallback.fusions import fuse
from quire.models.fallback.halves import Halves
from quire.models.fallback.own_caches import OwnCaches
from quire.models.fallback.paged import PAGED, PagedAttention
from quire.models.fallback.products import Products, find_products, use_kernels
from quire.models.fallback.rows_only import RowsOnly
from quire.models.layers.factory import LayerFactory
from quire.models.layers.rotary import Positions
from quire.models.spec import ModelSpec
from quire.models.weights.checkpoint import READABLE_DTYPES, Checkpoint, WeightSpec
from quire.models.weights.safetensors import DTYPES
from quire.models.weights.tensor_options import TensorOptions

_SHOWN = 8


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
        model = build_on_meta(kind, config, build.options.dtype)
        self._model = model
        self._halves = Halves(model, description.is_separate)
        products = find_products(model, self._run_on_meta) if build.options.device.type == "cpu" else []
        build.remember(TransformersWeights(model, self, build.options, products))
        self._paged = PagedAttention(model, description) if description.tier == "paged" else None
        self.own = None if self._paged else OwnCaches(self._halves)

    def embed(self, tokens: Tensor, positions: Positions) -> Stream:
        """Return the tokens themselves, which the modules embed."""
        return Stream(tokens, None)

    def blocks(self, stream: Stream, positions: Positions, attention: AttentionBackend) -> Iterator[Stream]:
        """Yield the hidden states that the head reads."""
        if self._paged is not None:
            self._paged.begin(attention)
            inputs = {"position_ids": positions.own[None], "use_cache": False}
            yield Stream(self._halves.hidden(stream.x, **inputs)[0], None)
        else:
            assert self.own is not None
            assert isinstance(attention, RowsOnly)
            yield Stream(self.own.hidden(stream.x, attention), None)

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

    def reference(self, tokens: Tensor) -> Tensor:
        """Compute a whole sequence with the model's own eager attention: tokens [tokens] → logits [tokens, vocab]."""
        set_attention(self._model, EAGER)
        try:
            without = {"use_cache": False} if "use_cache" in arguments_of(self._model) else {}
            output: Any = self._model(input_ids=tokens[None], **without)
            logits: Tensor = output.logits[0]
        finally:
            if self._paged is not None:
                set_attention(self._model, PAGED)
        return logits


class TransformersWeights:
    """All weights of a model of transformers, as one layer."""

    def __init__(
        self, model: PreTrainedModel, decoder: FallbackDecoder, options: TensorOptions, products: Products
    ) -> None:
        self.decoder = decoder
        self._model = model
        self._options = options
        self._products = products

    def weight_specs(self) -> Iterator[WeightSpec]:
        """Yield the model's own names and shapes. Files may have others, which transformers converts."""
        seen = set()
        for name, tensor in self._model.state_dict(keep_vars=True).items():
            if id(tensor) not in seen and tensor.is_floating_point():
                yield WeightSpec(name, tuple(tensor.shape))
            seen.add(id(tensor))

    def load_weights(self, checkpoint: Checkpoint) -> None:
        """Read all weights through transformers' conversion of names and layouts.

        Raises:
            CheckpointError: Files and model do not fit each other.
        """
        model, device, dtype = self._model, self._options.device, self._options.dtype
        stored = checkpoint.contents()
        is_dummy = set(stored) == {spec.name for spec in self.weight_specs()}
        mapping: list[Any] = get_model_conversion_mapping(model)
        config = LoadStateDictConfig(
            dtype=dtype,
            dtype_plan=model._get_dtype_plan(dtype),
            device_map={"": device},
            weight_mapping=None if is_dummy else mapping,
        )
        lazy = {name: _Lazy(checkpoint, name, device) for name in stored}
        with torch.inference_mode(False), torch.no_grad(), _without_progress_bars():
            found, _ = convert_and_load_state_dict_in_model(model, lazy, config)
            _refuse([f"{name}: expected {list(b)}, found {list(a)}" for name, a, b in found.mismatched_keys], model)
            _refuse([f"{name}: {error}" for name, error in found.conversion_errors.items()], model)
            type(model)._finalize_model_loading(model, config, found)
        _refuse([f"{name}: missing" for name in found.missing_keys], model)
        _refuse([f"{name}: {type(model).__name__} has no such weight" for name in found.unexpected_keys], model)
        model.requires_grad_(False)
        if device.type == "cpu":
            use_kernels(self._products, dtype)
            fuse(model, dtype)


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    """Leave progress to Quire's own bar."""
    were_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if were_shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


class _Lazy:
    """A tensor of a checkpoint that is read when transformers slices it."""

    def __init__(self, checkpoint: Checkpoint, name: str, device: torch.device) -> None:
        self._checkpoint = checkpoint
        self._name = name
        self._device = device
        self._stored = checkpoint.contents()[name]
        self.shape = self._stored.shape

    def __getitem__(self, _: Any) -> Tensor:
        dtype = DTYPES.get(self._stored.dtype, torch.float32)
        if self._stored.dtype not in DTYPES and self._stored.dtype not in READABLE_DTYPES:
            raise CheckpointError(f"{self._name}: dtype {self._stored.dtype} is not served.")
        out = torch.empty(self.shape, dtype=dtype, device=self._device)
        self._checkpoint.read(self._name, out)
        return out


def _refuse(wrong: list[str], model: PreTrainedModel) -> None:
    if wrong:
        listed = "\n  ".join(sorted(wrong)[:_SHOWN] + [f"… and {len(wrong) - _SHOWN} more"] * (len(wrong) > _SHOWN))
        raise CheckpointError(
            f"The weights do not match {type(model).__name__} ({len(wrong)} differences):\n  {listed}\n"
            "Download the checkpoint again, or check that config.json belongs to it."
        )
