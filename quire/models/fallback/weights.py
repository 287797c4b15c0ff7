"""The weights of a model that transformers' own modules compute."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import logging as transformers_logging

from quire.errors import CheckpointError
from quire.models.fallback.direct_calls import call_directly
from quire.models.fallback.fusions import fuse
from quire.models.fallback.products import Products, use_kernels
from quire.models.weights.checkpoint import READABLE_DTYPES, Checkpoint, WeightSpec
from quire.models.weights.safetensors import DTYPES
from quire.models.weights.tensor_options import TensorOptions

_SHOWN = 8
_log = logging.getLogger(__name__)


class Computes(Protocol):
    """What computes with the weights."""

    def fuse_attentions(self, dtype: torch.dtype) -> None:
        """Let Quire's kernels compute whole attention modules of the loaded model, where they compute the same."""
        ...


class TransformersWeights:
    """All weights of a model of transformers, as one layer.

    Args:
        model: The model, on the meta device.
        decoder: Computes with the weights.
        options: Their device and dtype.
        products: Linear layers that Quire's kernels compute.
        leaves_out: Whether files may have weights that the model has no place for, such as a head that is not computed.
        is_part: Whether most of the files' weights are those of another part of the model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        decoder: Computes,
        options: TensorOptions,
        products: Products,
        *,
        leaves_out: bool = False,
        is_part: bool = False,
    ) -> None:
        self.decoder = decoder
        self._leaves_out = leaves_out
        self._is_part = is_part
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
        with torch.inference_mode(False), torch.no_grad(), _silent():
            found, _ = convert_and_load_state_dict_in_model(model, lazy, config)
            _refuse([f"{name}: expected {list(b)}, found {list(a)}" for name, a, b in found.mismatched_keys], model)
            _refuse([f"{name}: {error}" for name, error in found.conversion_errors.items()], model)
            type(model)._finalize_model_loading(model, config, found)
        _refuse([f"{name}: missing" for name in found.missing_keys], model)
        if self._leaves_out and not self._is_part:
            _log_left_out(sorted(found.unexpected_keys), model)
        elif not self._leaves_out:
            _refuse([f"{name}: {type(model).__name__} has no such weight" for name in found.unexpected_keys], model)
        model.requires_grad_(False)
        if self._is_part:
            return  # towers capture states of layers by hooks, which direct calls would not run
        if device.type == "cpu":
            use_kernels(self._products, dtype)
            fuse(model, dtype)
            self.decoder.fuse_attentions(dtype)
        call_directly(model)


@contextmanager
def _silent() -> Iterator[None]:
    """Leave progress to Quire's own bar, and what is missing or left out to its own words."""
    were_shown, level = transformers_logging.is_progress_bar_enabled(), transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if were_shown:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


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


def _log_left_out(names: Sequence[str], model: PreTrainedModel) -> None:
    if names:
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        _log.info("%s leaves weights out: %s%s", type(model).__name__, ", ".join(names[:_SHOWN]), more)
