"""A tower that transformers' own modules compute: what a class's forward puts in place of an image's tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from quire.errors import CheckpointError
from quire.models.fallback.classes import (
    arguments_of,
    build_on_meta,
    read_config,
    sees_images,
    set_attention,
    text_config_of,
)
from quire.models.fallback.weights import TransformersWeights
from quire.models.layers.factory import LayerFactory
from quire.models.vision.module_spec import ModuleVisionSpec
from quire.models.vision.pixel_settings import CHANNELS
from quire.models.vision.tower import Pixels

_BEFORE, _BEHIND = 3, 2
"""Tokens of text around an image."""
_MANY = 1 << 24


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

    def get_per_layer_inputs(self, *_: Any) -> None:
        """Return none of the inputs that layers have of tokens, which a text model makes of them by itself."""

    def forward(self, *args: Any, **inputs: Any) -> None:
        raise TextStub.Called({**inputs, **({"an argument without a name": args} if args else {})})


class StubEmbedding(nn.Module):
    """Embeddings that are one half everywhere.

    Attributes:
        device: Where they are.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self._hidden = hidden
        self.device = torch.device("cpu")

    @property
    def weight(self) -> Tensor:
        """The vectors of more tokens than any model has."""
        return torch.full((1, self._hidden), 0.5, device=self.device).expand(_MANY, -1)

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
    """Images to the vectors that stand in place of their tokens, computed by transformers' modules. The class's own
    forward is run as far as its text model, which gets them.

    Args:
        spec: The tower.
        build: Remembers the weights as one layer.

    Attributes:
        model: The class's model, with a TextStub in it.
        device: Where it is.
    """

    def __init__(self, spec: ModuleVisionSpec, build: LayerFactory) -> None:
        self.spec = spec
        self.model: Any = build_tower_model(Path(spec.directory), spec.architecture, build.options.dtype)
        self.device = build.options.device
        for module in self.model.modules():
            if isinstance(module, StubEmbedding):
                module.device = self.device
        self._dtype = build.options.dtype
        self._types = {"mm_token_type_ids", "token_type_ids"}
        self._types &= arguments_of(self.model) | arguments_of(self.model.base_model)
        begin = getattr(self.model.config, "vision_start_token_id", None)  # by which some classes find images
        self._before = [1] * _BEFORE + [begin] * isinstance(begin, int)
        build.remember(TransformersWeights(self.model, self, build.options, [], leaves_out=True, is_part=True))
        self._numbers = None if spec.video is None else Pixels(spec.video.pixels, build.options)

    def fuse_attentions(self, dtype: torch.dtype) -> None:
        """Do nothing: a tower's attention is transformers' own."""

    def __call__(self, images: Sequence[Mapping[str, Tensor] | Tensor]) -> list[Tensor]:
        """Compute vectors: the tensors of each image, its tokens among them, or videos [frames, height, width, 3]
        uint8 → [vectors, outputs] each."""
        return [self._of_video(each) if isinstance(each, Tensor) else self.vectors(each) for each in images]

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
            tokens = torch.full((1, rows * columns // merge**2), self.spec.image_token, device=video.device)
            vectors.append(self.vectors({"pixel_values": patches, "image_grid_thw": grid, "input_ids": tokens}))
        return torch.cat(vectors)

    def vectors(self, image: Mapping[str, Tensor]) -> Tensor:
        """Return the vectors [vectors, outputs] of one image, or of several with the tokens between them."""
        inputs = self.text_inputs(image)
        given: Tensor = inputs["inputs_embeds"][0][inputs["ids"][0] == self.spec.image_token]
        return torch.cat([given, *(each.to(given.dtype) for each in layer_vectors(inputs))], -1).to(self._dtype)

    def text_inputs(self, image: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return what the class's forward calls its text model with, and as `ids` the tokens: those of the image among
        others. Raises CheckpointError if it does not call it."""
        own = image["input_ids"]
        before, behind = (own.new_tensor([tokens]) for tokens in (self._before, [2] * _BEHIND))
        ids = torch.cat((before, own, behind), 1)
        inputs = {name: each.to(self._dtype) if each.is_floating_point() else each for name, each in image.items()}
        inputs |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        inputs |= dict.fromkeys(self._types, (ids == self.spec.image_token).int())
        try:
            with torch.inference_mode():
                self.model(**inputs)
        except TextStub.Called as called:
            return {**called.inputs, "ids": ids}
        raise CheckpointError("its own forward does not call its text model")


def layer_vectors(inputs: Mapping[str, Any]) -> list[Tensor]:
    """Return the vectors of an image that a text model adds to the stream of some layers, in their order."""
    found = inputs.get("deepstack_visual_embeds") or inputs.get("deepstack_features") or ()
    return [found[layer] for layer in sorted(found)] if isinstance(found, Mapping) else list(found)
