"""Pixels for towers, compared with transformers' image processors bit for bit."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from quire.media.clip_processor import ClipProcessor
from quire.media.decode import as_rgb, decode
from quire.models.vision.pixel_settings import PixelValues
from quire.models.vision.vision_spec import ClipSpec, read_vision
from tests.media.checkpoints import SIDE, TOKENS, clip_settings, file_of, make_llava, picture

if TYPE_CHECKING:
    from PIL.Image import Image

SIZES = ((1, 1), (1, 50), (42, 42), (41, 43), (60, 44), (333, 97), (5, 4000), (1280, 720), (3000, 2000))


def spec_of(settings: dict[str, Any]) -> ClipSpec:
    return ClipSpec(
        image_token=5, pixels=PixelValues.of(settings), image_size=SIDE, patch_size=14, hidden=32, width=48, layers=2,
        heads=4, activation="quick_gelu", eps=1e-5, keeps_class=False, projector_activation="gelu",
        projector_bias=True, outputs=48,
    )  # fmt: skip


def numbers(settings: dict[str, Any], image: Image) -> Any:
    spec = spec_of(settings)
    pixels = ClipProcessor(spec, settings).picture(as_rgb(image)).pixels
    assert pixels.dtype == np.uint8
    return spec.pixels.table[pixels, np.arange(3)].transpose(2, 0, 1)


VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"resample": 2, "image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.3, 0.4]},
    {"size": {"height": SIDE, "width": SIDE}, "do_center_crop": False, "do_normalize": False},
    {"size": {"shortest_edge": 20}, "rescale_factor": 1 / 127.5},
)


@pytest.mark.parametrize("variant", VARIANTS)
def test_pixels_equal_those_of_clips_processor(variant: dict[str, Any]) -> None:
    from transformers import CLIPImageProcessorPil

    settings = clip_settings() | variant
    reference = CLIPImageProcessorPil(**{k: v for k, v in settings.items() if k != "image_processor_type"})
    for width, height in SIZES if not variant else SIZES[:6]:
        image = picture(width, height)
        expected = reference(images=image, return_tensors="np")["pixel_values"][0]
        np.testing.assert_array_equal(numbers(settings, image), expected)


def test_squares_equal_those_of_llavas_processor() -> None:
    from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil

    settings = clip_settings() | {"do_pad": True}
    reference = LlavaImageProcessorPil(do_pad=True, size=settings["size"], crop_size=settings["crop_size"])
    for width, height in SIZES[:6]:
        image = picture(width, height)
        expected = reference(images=image, return_tensors="np")["pixel_values"][0]
        np.testing.assert_array_equal(numbers(settings, image), expected)


@pytest.mark.parametrize("mode", ["L", "LA", "P", "PA", "RGBA", "CMYK", "1", "YCbCr", "HSV", "LAB"])
def test_every_mode_of_colours_is_read_as_by_transformers(mode: str) -> None:
    from transformers import CLIPImageProcessorPil

    image = picture().convert("RGB").convert("L" if mode == "1" else "RGB")
    image = image.convert("P").convert("PA") if mode == "PA" else image.convert("RGB") if mode == "LAB" else image
    if mode not in ("PA", "LAB"):
        image = image.convert("L").convert("LA") if mode == "LA" else image.convert(mode)
    settings = clip_settings()
    reference = CLIPImageProcessorPil(size=settings["size"], crop_size=settings["crop_size"])
    expected = reference(images=image, return_tensors="np")["pixel_values"][0]
    np.testing.assert_array_equal(numbers(settings, image), expected)


def test_files_of_every_format_are_the_pictures_that_pillow_reads() -> None:
    from PIL import Image

    image = picture()
    for kind, options in (
        ("PNG", {}),
        ("JPEG", {}),
        ("WEBP", {"lossless": True}),
        ("GIF", {}),
        ("BMP", {}),
        ("TIFF", {}),
    ):
        content = file_of(image, kind, **options)
        found = decode(content)
        assert found.mode == "RGB"
        np.testing.assert_array_equal(np.asarray(found), np.asarray(Image.open(io.BytesIO(content)).convert("RGB")))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_pictures_are_turned_upright(orientation: int) -> None:
    from PIL import Image, ImageOps

    exif = Image.Exif()
    exif[0x0112] = orientation
    content = file_of(picture(), "PNG", exif=exif)
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
    assert expected is not None
    np.testing.assert_array_equal(np.asarray(decode(content)), np.asarray(expected))


def test_animations_show_their_first_picture_and_sixteen_bits_are_scaled() -> None:
    from PIL import Image

    frames = [picture(seed=seed).quantize(16) for seed in range(3)]
    content = file_of(frames[0], "GIF", save_all=True, append_images=frames[1:])
    np.testing.assert_array_equal(np.asarray(decode(content)), np.asarray(frames[0].convert("RGB")))

    grey = np.arange(256, dtype=np.uint8).reshape(16, 16)
    deep = Image.fromarray(grey.astype(np.uint16) * 257)
    found = np.asarray(decode(file_of(deep)))
    np.testing.assert_array_equal(found, np.repeat(grey[:, :, None], 3, axis=2))


def test_the_tower_of_a_checkpoint_is_read(tmp_path: Path) -> None:
    spec = read_vision(make_llava(tmp_path / "model"))
    assert isinstance(spec, ClipSpec)
    assert (spec.tokens, spec.layers, spec.outputs, spec.image_size) == (TOKENS, 2, 48, SIDE)
    assert spec.pixels == PixelValues.of(clip_settings())


def test_settings_that_the_tower_cannot_read_are_refused() -> None:
    for wrong in ({"crop_size": 30}, {"resample": 9}, {"size": {"height": 0, "width": 4}}, {"crop_size": "large"}):
        settings = clip_settings() | wrong
        with pytest.raises(ValueError, match=r"must|reads squares"):
            ClipProcessor(spec_of(settings), settings)
