"""transformers' processor of a checkpoint: images to the tensors that its model's tower takes, and to tokens."""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import transformers
from numpy.typing import NDArray
from transformers import AutoImageProcessor, AutoTokenizer
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES  # type: ignore[attr-defined]

from quire.errors import CheckpointError, RequestError

if TYPE_CHECKING:
    from PIL.Image import Image

TEXTS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "labels")
"""What a processor makes of texts."""
LOADING: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
"""Options by which no code of a checkpoint is run, and nothing is downloaded."""
_PARTS = ("image_processor", "video", "feature_extractor")
"""In the names of parts of processors that may be left out."""
_FILES = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")
_MOST = ("max_soft_tokens",)
"""Names of settings that bound how many vectors an image has."""
_SHOWN = 300
NUMBERED = 64
"""Most images of a prompt, where processors number them."""
_ALIKE = {"ShieldGemma2Processor": "Gemma3Processor"}
"""Processors that write prompts of their own, and those that lay out an image in the same way in any prompt."""
_AROUND = (("image_start_token", "image_end_token"),)
"""Names of tokens that prompts have around a placeholder, where a processor looks for them."""
_UNNAMED = {"fast_vlm": "LlavaProcessor", "glm_ocr": "Glm46VProcessor", "glmga": "Glm46VProcessor"}
"""Processors of model types for which transformers names none."""


class ImageInputs(NamedTuple):
    """What a processor makes of an image.

    Attributes:
        tokens: What takes the place of the image's placeholder in a prompt.
        tensors: What the tower takes, by name; `input_ids` are the tokens.
    """

    tokens: list[int]
    tensors: dict[str, NDArray[Any]]


class Repeated(NamedTuple):
    """What becomes of an image's tokens behind other images of a prompt.

    Attributes:
        numbered: Where its number stands among its tokens.
        numbers: The tokens of each number, from that of the first image; empty: images are not numbered.
        joint: The token that an image begins and ends with, of which two that touch have one between them; None: there
            is none.
    """

    numbered: int = 0
    numbers: tuple[tuple[int, ...], ...] = ()
    joint: int | None = None


class CheckpointProcessor:
    """A checkpoint's own processor, by transformers' class for it. No code of the checkpoint is run.

    Args:
        directory: The checkpoint.
        image_token: The token that stands for a vector of an image.

    Attributes:
        processor: The processor, of texts with images.

    Raises:
        CheckpointError: transformers has no such processor, or it cannot be built.
    """

    def __init__(self, directory: Path, image_token: int) -> None:
        self._image_token = image_token
        self._around = ("", "")
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(directory, **LOADING)
            self.processor = _build(directory, self._tokenizer)
        except CheckpointError:
            raise
        except Exception as error:  # transformers checks with errors of many kinds
            raise CheckpointError(f"transformers cannot build the checkpoint's image processor: {error}") from error

    @cached_property
    def placeholder(self) -> int:
        """The token that a prompt has for each image. Raises CheckpointError if none of the processor's tokens is."""
        problems = []
        named = [tuple(getattr(self.processor, name, None) for name in names) for names in _AROUND]
        pairs = [("", ""), *(pair for pair in named if all(isinstance(each, str) for each in pair))]
        for around, text in itertools.product(pairs, self._candidates()):
            token = self._tokenizer.convert_tokens_to_ids(text)
            mark = f"{around[0]}{text}{around[1]}"
            try:
                found = self._processed(mark, _small_image()) if isinstance(token, int) else None
            except Exception as error:  # of a processor that looks for another token
                problems.append(f"{text}: {error}")
                continue
            if found is not None and self._image_token in found.tokens:
                self._around = around
                return int(token)
        raise CheckpointError(
            f"No token of the checkpoint's processor stands for an image: {'; '.join(problems)[:_SHOWN]}"
        )

    def repeated(self) -> Repeated:
        """Find what becomes of an image's tokens behind other images.

        Raises:
            CheckpointError: They are other ones, and not for a number or a token that two images share.
        """
        if isinstance(self.processor, PixtralLayout):
            return Repeated()
        one, both = self._tokens_of(1), self._tokens_of(2)
        if both == one * 2:
            return Repeated()
        if any(self._around):
            raise CheckpointError("an image's tokens depend on the other images of a prompt, which is not built")
        if both == one + one[1:] and one[0] == one[-1] != self._image_token:
            return Repeated(joint=one[0])
        second = both[len(one) :]
        begin = next(place for place, pair in enumerate(zip(one, second, strict=False)) if pair[0] != pair[1])
        behind = len(one) - begin
        while behind and one[-behind:] != second[-behind:]:
            behind -= 1
        numbers, rest = list[tuple[int, ...]](), self._tokens_of(NUMBERED) if behind else []
        while rest[:begin] == one[:begin] and len(numbers) < NUMBERED:
            ends = (end for end in range(begin, len(rest)) if rest[end : end + behind] == one[-behind:])
            end = next(ends, begin)
            numbers.append(tuple(rest[begin:end]))
            rest = rest[end + behind :]
        if rest or len(numbers) != NUMBERED or any(self._image_token in each for each in [one[:begin], *numbers]):
            raise CheckpointError("an image's tokens depend on the other images of a prompt, which is not built")
        return Repeated(begin, tuple(numbers))

    @property
    def most_vectors(self) -> int:
        """The most vectors of an image that the image processor's settings allow; 0: none of them says so."""
        images = getattr(self.processor, "image_processor", None)
        return max((each for name in _MOST if type(each := getattr(images, name, None)) is int), default=0)

    def tokens_of_text(self, text: str) -> list[int]:
        """Return the tokens of a text that stands among other tokens."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _tokens_of(self, count: int) -> list[int]:
        return self._processed(self._mark * count, *[_small_image()] * count).tokens

    def of_several(self, images: Sequence[Image]) -> ImageInputs | None:
        """Return what the model takes of a prompt of these images alone; None: it is not known."""
        if isinstance(self.processor, PixtralLayout):
            return None
        return self._processed(self._mark * len(images), *images)

    def inputs(self, image: Image) -> ImageInputs:
        """Return what the model takes of an image in mode RGB. Raises RequestError if the processor refuses it."""
        try:
            found = self._processed(self._mark, image)
        except Exception as error:  # processors check sizes with errors of many kinds
            first = (str(error).strip().splitlines() or [""])[0]
            raise RequestError(
                f"The model's processor cannot read an image of {image.width} x {image.height} pixels "
                f"({type(error).__name__}: {first})."
            ) from None
        before, behind = (len(self._tokenizer.tokenize(text)) for text in self._around)
        own = found.tokens[before : len(found.tokens) - behind]
        return ImageInputs(own, found.tensors)

    @cached_property
    def _mark(self) -> str:
        """The placeholder, with the tokens that prompts have around it."""
        text = self._tokenizer.convert_ids_to_tokens(self.placeholder)  # which finds what stands around
        return f"{self._around[0]}{text}{self._around[1]}"

    def _processed(self, text: str, *images: Image) -> ImageInputs:
        found = self.processor(text=[text], images=list(images), add_special_tokens=False, return_tensors="pt")
        tokens = [int(each) for each in found["input_ids"][0]]
        return ImageInputs(tokens, arrays_of(found))

    def _candidates(self) -> list[str]:
        """Return texts of tokens that may stand for an image, the likeliest first."""
        names = sorted(
            (name for name in dir(self.processor) if name.endswith("_token") and not name.startswith("_")),
            key=lambda name: ("image" not in name, name != "image_token", name),
        )
        values = [getattr(self.processor, name, None) for name in names]
        texts = [each for value in values if isinstance(each := getattr(value, "content", value), str)]
        own = self._tokenizer.convert_ids_to_tokens(self._image_token)
        return list(dict.fromkeys([*texts, *([own] if own else [])]))


def arrays_of(found: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """Return what a processor made of an image or a sound as arrays, with its tokens as `input_ids` [1, tokens] int64.
    numpy has no bfloat16, whose values fp32 has, too."""
    arrays = {}
    for name, value in found.items():
        if name not in TEXTS and value is not None:
            arrays[name] = np.asarray(value.float() if str(getattr(value, "dtype", "")) == "torch.bfloat16" else value)
    return arrays | {"input_ids": np.asarray([[int(each) for each in found["input_ids"][0]]], np.int64)}


class _Absent:
    """Stands for the part of a processor that reads something other than images."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def _small_image() -> Image:
    from PIL import Image

    return Image.new("RGB", (64, 48), (90, 120, 150))


def _build(directory: Path, tokenizer: Any) -> Callable[..., Any]:
    """Build the processor of a checkpoint, without those of videos and sounds."""
    images = _image_processor(directory)
    kind = processor_class(directory)
    if kind is None:
        return PixtralLayout(images, tokenizer, _settings(directory, _FILES[0]))
    return build_processor(directory, kind, {"tokenizer": tokenizer, "image_processor": images})


def build_processor(directory: Path, kind: Any, given: Mapping[str, Any]) -> Callable[..., Any]:
    """Build a processor of a class with these parts, and without those that read something else.

    Raises:
        CheckpointError: The class needs a part of another kind.
    """

    class Processor(kind):  # type: ignore[misc]
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            if not isinstance(argument, _Absent):
                return super().check_argument_for_proper_class(argument_name, argument)
            return _Absent

    Processor.__name__ = kind.__name__
    parts: dict[str, Any] = {}
    for name in kind.get_attributes():
        if name not in given and not any(each in name for each in _PARTS):
            raise CheckpointError(f"{kind.__name__} needs {name}, which is not built.")
        parts[name] = given.get(name) or _Absent()
    known = inspect.signature(kind.__init__).parameters
    own = {
        name: value for name, value in _settings(directory, _FILES[0]).items() if name in known and name not in parts
    }
    built: Callable[..., Any] = Processor(**parts, **own | {"chat_template": None} if "chat_template" in known else own)
    return built


def _image_processor(directory: Path) -> Any:
    """Return the image processor, that of Pillow if there is one: its pixels are the same on every machine."""
    try:
        return AutoImageProcessor.from_pretrained(directory, backend="pil", **LOADING)  # type: ignore[no-untyped-call]
    except (ImportError, ValueError):
        if importlib.util.find_spec("torchvision") is None:
            raise CheckpointError(
                "its image processor needs torchvision, which is not installed: pip install torchvision"
            ) from None
        return AutoImageProcessor.from_pretrained(directory, **LOADING)  # type: ignore[no-untyped-call]


def processor_class(directory: Path) -> Any:
    """Return the class of a checkpoint's processor; None: its layout of tokens is built here."""
    named = [_settings(directory, name).get("processor_class") for name in _FILES]
    kind = str(_settings(directory, "config.json").get("model_type"))
    name = next((each for each in named if each), None) or PROCESSOR_MAPPING_NAMES.get(kind) or _UNNAMED.get(kind)
    if name == "PixtralProcessor":
        return None
    found = getattr(transformers, _ALIKE.get(str(name), str(name)), None)
    if found is None:
        raise CheckpointError(f"transformers {transformers.__version__} has no processor {name!r}.")
    return found


def _settings(directory: Path, name: str) -> dict[str, Any]:
    try:
        found = json.loads((directory / name).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


class PixtralLayout:
    """Pixtral's layout of an image's tokens: rows with a token between them, and another behind the last one (Agrawal
    et al. 2024, "Pixtral 12B", section 2.2).

    Args:
        images: The image processor.
        tokenizer: Knows the tokens.
        settings: Those of the processor: a patch's size, and how many patches of a side are merged.

    Attributes:
        side: Height and width of the pixels that become one vector.
    """

    image_token = "[IMG]"

    def __init__(self, images: Any, tokenizer: Any, settings: dict[str, Any]) -> None:
        self.images = images
        self.side = int(settings.get("patch_size", 16)) * int(settings.get("spatial_merge_size", 1))
        self.tokenizer = tokenizer
        tokens = self.image_token, "[IMG_BREAK]", "[IMG_END]"
        self._tokens = [tokenizer.convert_tokens_to_ids(each) for each in tokens]

    def __call__(self, *, text: Sequence[str], images: Sequence[Image], **_: Any) -> dict[str, Any]:
        """Return tensors and tokens of one image, whose placeholder is all of the text."""
        if list(text) != [self.image_token]:
            raise ValueError(f"{text} is not {self.image_token}")
        found = self.images(images=list(images), patch_size=self.side, return_tensors="pt")
        height, width = (int(each) for each in found["image_sizes"][0])
        token, between, end = self._tokens
        row = [token] * (width // self.side) + [between]
        return {**found, "input_ids": [row * (height // self.side - 1) + row[:-1] + [end]]}
