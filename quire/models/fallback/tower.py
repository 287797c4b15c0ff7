"""A tower that transformers' own modules compute: images to vectors, by a class's `get_image_features`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from quire.errors import CheckpointError
from quire.models.fallback.classes import build_on_meta, read_config, sees_images, set_attention, text_config_of
from quire.models.fallback.weights import TransformersWeights
from quire.models.layers.factory import LayerFactory
from quire.models.vision.module_spec import ModuleVisionSpec
from quire.models.vision.pixel_settings import CHANNELS
from quire.models.vision.tower import Pixels


class TextStub(nn.Module):
    """Stands in the place of the text model, and notes what it is called with.

    Args:
        hidden: Width of the embeddings.
    """

    class Called(Exception):
        """The text model would be computed now. `inputs` are its arguments."""

        def __init__(self, inputs: Mapping[str, Any]) -> None:
            super().__init__()
            self.inputs = inputs

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.embed_tokens = StubEmbedding(hidden)

    def get_input_embeddings(self) -> nn.Module:
        """Return the embeddings."""
        return self.embed_tokens

    def get_output_embeddings(self) -> None:
        """Return no head."""

    def forward(self, *args: Any, **inputs: Any) -> None:
        raise TextStub.Called({**inputs, **({"an argument without a name": args} if args else {})})


class StubEmbedding(nn.Module):
    """Embeddings that are one half everywhere."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self._hidden = hidden

    @property
    def weight(self) -> Tensor:
        """The vectors of two tokens."""
        return torch.full((2, self._hidden), 0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.full((*tokens.shape, self._hidden), 0.5, device=tokens.device)


def build_tower_model(
    directory: Path, architecture: str, dtype: torch.dtype, *, images: bool = True
) -> PreTrainedModel:
    """Build a model on the meta device, with a TextStub in the place of its text model.

    Args:
        directory: The checkpoint.
        architecture: The class.
        dtype: The dtype of its weights.
        images: Whether the tower sees images.

    Raises:
        CheckpointError: The class has no tower apart from its text model, or none that sees images.
    """
    kind = getattr(transformers, architecture, None)
    if kind is None:
        raise CheckpointError(f"transformers {transformers.__version__} has no {architecture}.")
    if images and not sees_images(kind):
        raise CheckpointError(f"{architecture} has no get_image_features, by which images are computed.")
    config = read_config(directory)
    model = build_on_meta(kind, config, dtype)
    text: Any = model.get_decoder()  # type: ignore[no-untyped-call]
    name = next((name for name, module in model.named_modules() if module is text), "")
    if text is model or text is model.base_model or not name:
        raise CheckpointError(f"{architecture}'s tower is a part of its text model.")
    replace_module(model, name, TextStub(text_config_of(config).hidden_size))
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    for name, module in list(model.named_modules()):
        if module is head and name:
            replace_module(model, name, nn.Identity())
    model.all_tied_weights_keys = {}
    if getattr(model, "_supports_sdpa", False):
        set_attention(model, "sdpa")
    return model


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put another module in the place of the one of this name."""
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, module)


class ModuleTower:
    """Images to the vectors that stand in place of their placeholder tokens, computed by transformers' modules.

    Args:
        spec: The tower.
        build: Remembers the weights as one layer.
    """

    def __init__(self, spec: ModuleVisionSpec, build: LayerFactory) -> None:
        self.spec = spec
        self.model = build_tower_model(Path(spec.directory), spec.architecture, build.options.dtype)
        self._dtype = build.options.dtype
        self._owners: list[Any] = [self.model, self.model.base_model]
        having = [each for each in self._owners if hasattr(each, "get_image_features")]
        features = [inspect.unwrap(each.get_image_features) for each in having]
        self._accepted = frozenset(name for each in features for name in inspect.signature(each).parameters)
        build.remember(TransformersWeights(self.model, self, build.options, [], leaves_out=True, is_part=True))
        self._numbers = None if spec.video is None else Pixels(spec.video.pixels, build.options)

    def fuse_attentions(self, dtype: torch.dtype) -> None:
        """Do nothing: a tower's attention is transformers' own."""

    def __call__(self, images: Sequence[Mapping[str, Tensor] | Tensor]) -> list[Tensor]:
        """Compute vectors: the tensors of each image, or videos [frames, height, width, 3] uint8 → [vectors, outputs]
        each."""
        return [self._of_video(each) if isinstance(each, Tensor) else self._vectors(each) for each in images]

    def _of_video(self, video: Tensor) -> Tensor:
        """Compute a video's slices one by one: patches see those of their own slice alone."""
        layout, numbers, merge = self.spec.video, self._numbers, self.spec.merge
        assert layout is not None and numbers is not None, "a tower that reads no videos"
        size = layout.patch_size
        rows, columns = (length // size for length in video.shape[1:3])
        vectors = []
        for some in torch.split(video, layout.frames):
            squares = numbers(some).reshape(
                layout.frames, CHANNELS, rows // merge, merge, size, columns // merge, merge, size
            )
            patches = squares.permute(2, 5, 3, 6, 1, 0, 4, 7).reshape(rows * columns, -1)
            grid = torch.tensor([[1, rows, columns]], device=video.device)
            vectors.append(self._vectors({"pixel_values": patches, "image_grid_thw": grid}))
        return torch.cat(vectors)

    def typed(self, image: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors in the tower's dtype, where they are of floating point."""
        return {name: each.to(self._dtype) if each.is_floating_point() else each for name, each in image.items()}

    def _vectors(self, image: Mapping[str, Tensor]) -> Tensor:
        accepted = self._accepted
        inputs = {name: each for name, each in self.typed(image).items() if name in accepted or "args" in accepted}
        if "pixel_values" in accepted and not inputs and len(image) == 1:  # one that a class names in its own way
            inputs = dict(zip(("pixel_values",), self.typed(image).values(), strict=True))
        features: Any = next(each for each in self._owners if hasattr(each, "get_image_features")).get_image_features
        with torch.inference_mode():
            found = features(**inputs)
            deep = getattr(found, "deepstack_features", None) or ()
            vectors = torch.cat([flat(found), *map(flat, deep)], -1)
        return vectors.to(self._dtype)


def flat(found: Any) -> Tensor:
    """Return vectors [vectors, width] of what a `get_image_features` returned."""
    pooled = getattr(found, "pooler_output", None)
    value = found if pooled is None else pooled
    if isinstance(value, (list, tuple)):
        return torch.cat([flat(each) for each in value])
    assert isinstance(value, Tensor), f"features of type {type(value).__name__}"
    return value.reshape(-1, value.shape[-1])
