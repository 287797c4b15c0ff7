"""What is known about a tower that transformers' modules compute: plain data, found by fallback/tower_inspection.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.models.vision.pixel_settings import SAMPLING, PixelValues


@dataclass(frozen=True)
class VideoLayout:
    """How a model reads videos whose times are told by texts between slices (Qwen3-VL).

    Attributes:
        token: The token that stands for each of a video's vectors, and for a video in prompts.
        around: The tokens before and behind a slice's vectors.
        pixels: How pixels become numbers.
        patch_size: Height and width of patches, in pixels.
        frames: How many frames a slice has.
    """

    token: int
    around: tuple[int, int]
    pixels: PixelValues
    patch_size: int
    frames: int


@dataclass(frozen=True)
class ModuleVisionSpec:
    """A tower and a projector that transformers' own modules compute.

    Attributes:
        directory: The checkpoint's directory.
        architecture: The class that has the tower.
        image_token: The token that stands for each of an image's vectors.
        placeholder: The token that prompts have for each image.
        outputs: Width of an image's vectors, with those for layers.
        deep: For how many layers an image has vectors of its own (DeepStack).
        longest: Most vectors of an image whose tokens see one another, those behind them as well; 0: they do not.
        numbered, numbers, joint: What becomes of an image's tokens behind other images: `Repeated` in
            fallback/image_processor.py.
        num_parameters: Number of weights that are loaded.
        least_tokens, largest_tokens: Fewest and most tokens of an image, of those that were tried.
        elements: What the tower computes at once for one of the most tokens, in elements.
        merge: How many patches of a side become one vector, in models whose positions tell rows and columns; 0 in
            others.
        video: How it reads videos; None: it reads none.
    """

    directory: str
    architecture: str
    image_token: int
    placeholder: int
    outputs: int
    num_parameters: int
    least_tokens: int
    largest_tokens: int
    elements: int
    merge: int = 0
    deep: int = 0
    longest: int = 0
    numbered: int = 0
    numbers: tuple[tuple[int, ...], ...] = ()
    joint: int | None = None
    video: VideoLayout | None = None

    @property
    def video_token(self) -> int | None:
        """The token that stands for each of a video's vectors; None: videos are not read."""
        return None if self.video is None else self.video.token

    @property
    def two_sided(self) -> bool:
        """Whether tokens that stand for an image's vectors see one another, and are computed in one step."""
        return self.longest > 0

    def tokens_behind(self, before: Sequence[int], number: int, tokens: list[int]) -> list[int]:
        """Return an image's tokens where it is the one of this number, from 0, and these tokens stand before it. Raises
        ValueError if there are more images than have numbers."""
        if self.numbers:
            if number >= len(self.numbers):
                raise ValueError(f"a prompt may have at most {len(self.numbers)} images of this model")
            rest = self.numbered + len(self.numbers[0])
            return [*tokens[: self.numbered], *self.numbers[number], *tokens[rest:]]
        return tokens[1:] if before and before[-1] == self.joint == tokens[0] else tokens

    def most_tokens(self, replaced: Mapping[str, Any]) -> int:
        """Return the most tokens of an image. Raises ValueError for settings of the processor that are replaced."""
        if replaced.keys() - set(() if self.video is None else SAMPLING):
            raise ValueError(f"transformers' image processor of {self.architecture} has the checkpoint's settings")
        return self.largest_tokens

    def activations(self, tokens: int, together: int) -> int:
        """Return the elements that an image takes at once; images are computed one by one."""
        return self.elements
