"""What towers for images have in common: the interface, and how pixels become numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from quire.models.audio.audio_spec import SpeechSpec
from quire.models.families.family import Family, ModuleNames
from quire.models.layer_spec import AttentionSpec, LayerSpec, MlpSpec, NormSpec
from quire.models.spec import ModelSpec
from quire.models.vision.pixel_settings import CHANNELS, PixelValues
from quire.models.vision.vision_spec import ClipSpec, QwenVisionSpec
from quire.models.weights.checkpoint import Checkpoint, WeightSpec
from quire.models.weights.tensor_options import TensorOptions


class Tower(Protocol):
    """Images to the vectors that stand in place of their placeholder tokens."""

    def __call__(self, images: Sequence[Any]) -> list[Tensor]:
        """Compute vectors: images [height, width, 3] uint8, or what a processor made → [vectors, outputs] each."""
        ...


class Pixels:
    """Makes numbers of pixels.

    Args:
        values: What the numbers are.
        options: The device and dtype of the numbers.
    """

    def __init__(self, values: PixelValues, options: TensorOptions) -> None:
        self._table = torch.from_numpy(values.table.copy()).to(options.device)
        self._colours = torch.arange(CHANNELS, device=options.device)
        self._dtype = options.dtype

    def __call__(self, images: Tensor) -> Tensor:
        """Look up numbers: images [..., height, width, 3] uint8 → [..., 3, height, width]."""
        return self._table[images.long(), self._colours].movedim(-1, -3).to(self._dtype)


def layers_spec(
    name: str,
    modules: ModuleNames,
    spec: ClipSpec | QwenVisionSpec | SpeechSpec,
    norms: NormSpec,
    *,
    gated: bool = False,
) -> ModelSpec:
    """Return a tower's layers as an encoder's, all alike.

    Args:
        name: The architecture's name.
        modules: The checkpoint's names.
        spec: The tower.
        norms: Its kind of norm.
        gated: Whether MLPs have gates.
    """
    h, head = spec.hidden, spec.hidden // spec.heads
    mixer = AttentionSpec(
        h, h, spec.heads, spec.heads, head, scale=head**-0.5, qkv_bias=True, out_bias=True, two_sided=True
    )
    mlp = MlpSpec(h, spec.width, spec.activation, gated=gated, bias=True)
    return ModelSpec(
        architecture=name,
        family=Family(modules=modules),
        vocab_size=1,
        hidden=h,
        layers=(LayerSpec(mixer, mlp, norms),) * spec.layers,
        norm=replace(norms, number=1),
        learned_positions=False,
        tie_embeddings=True,
        dtype="float32",
        max_model_len=1,
        bos_id=None,
        eos_ids=(),
        logit_cap=None,
    )


def read_weight(checkpoint: Checkpoint, spec: WeightSpec, options: TensorOptions) -> Tensor:
    """Read a tensor of a tower."""
    tensor = torch.empty(spec.shape, dtype=options.dtype, device=options.device)
    checkpoint.read(spec.name, tensor)
    return tensor
