"""Qwen2-VL's, Qwen2.5-VL's and Qwen3-VL's answers about videos, compared with transformers' `generate` in fp32."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from quire import LLM, SamplingParams
from quire.errors import RequestError
from quire.media.model_videos import QwenVideos
from quire.media.timed_videos import TimedVideos
from quire.media.video_decode import VideoLength
from quire.models.vision.module_spec import ModuleVisionSpec, VideoLayout
from quire.models.vision.pixel_settings import PixelValues
from quire.models.vision.vision_spec import QwenVisionSpec
from tests.media.checkpoints import QWEN_IMAGE, QWEN_PROCESSOR, make_qwen, picture

NEW_TOKENS = 32
VIDEO = QWEN_IMAGE.replace("image", "video")
Frames = NDArray[np.uint8]
RATE = 0.3
"""Frames a second, so few that the last slices' times are larger than their rows and columns."""


def frames_of(count: int, width: int, height: int, seed: int) -> Frames:
    return np.stack([np.asarray(picture(width, height, 100 * seed + each)) for each in range(count)])


CLIPS = frames_of(4, 30, 20, 1), frames_of(5, 20, 33, 2), frames_of(6, 24, 24, 3)
PROMPTS: tuple[tuple[str, tuple[int, ...], int], ...] = (
    ("The quick brown fox", (), 0),
    (f"{VIDEO} What is it?", (0,), 0),
    (f"one {VIDEO} two {QWEN_IMAGE} three {VIDEO}", (1, 2), 1),
    (f"{QWEN_IMAGE}{VIDEO}{VIDEO} four", (2, 0), 1),
)
"""Texts, the numbers of their clips, and how many images they have."""


@pytest.fixture(scope="module", params=["2", "2_5", "3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen(tmp_path_factory.mktemp("qwen") / "model", request.param)


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    return [reference(model, *each) for each in PROMPTS]


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), dtype="float32", max_num_batched_tokens=7, block_size=8) as llm:
        yield llm


def reference(model: Path, text: str, clips: Sequence[int], images: int) -> list[int]:
    """What transformers' model makes of a prompt, with pixels of its image processor, frame by frame."""
    import torch
    from transformers import AutoModelForImageTextToText, AutoTokenizer, Qwen2VLImageProcessorPil

    processor, given = Qwen2VLImageProcessorPil(**QWEN_PROCESSOR), dict[str, Any]()
    if images:
        found = processor(images=[picture(40, 30, each) for each in range(images)], return_tensors="pt")
        given = dict(found)
        for t, h, w in found["image_grid_thw"].tolist():
            text = text.replace("<|image_pad|>", "<|placeholder|>" * (t * h * w // 4), 1)
        text = text.replace("<|placeholder|>", "<|image_pad|>")
    values, grids = [], []
    reader = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32)
    is_timed = reader.config.model_type == "qwen3_vl"
    for number in clips:
        clip = [*CLIPS[number], *[CLIPS[number][-1]] * (len(CLIPS[number]) % 2)]
        if is_timed:
            processor, clip = Qwen2VLImageProcessorPil(**TIMED), resized(clip, len(CLIPS[number]))
        each = [processor(images=frame, return_tensors="pt") for frame in clip]
        _, h, w = each[0]["image_grid_thw"][0].tolist()
        both = [one["pixel_values"].view(h * w, 3, 2, -1)[:, :, 0] for one in each]
        for first, second in zip(both[::2], both[1::2], strict=True):
            values.append(torch.stack((first, second), 2).flatten(1))
        grids.append([len(clip) // 2, h, w])
        if is_timed:
            text = text.replace(VIDEO, timed(len(CLIPS[number]), RATE, h * w // 4), 1)
        else:
            text = text.replace("<|video_pad|>", "<|placeholder|>" * (len(clip) // 2 * h * w // 4), 1)
    text = text.replace("<|placeholder|>", "<|video_pad|>")
    reader.model.get_rope_index = from_the_largest(reader.model.get_rope_index)
    ids = AutoTokenizer.from_pretrained(model)(text, return_tensors="pt")["input_ids"]
    kinds = (ids == reader.config.image_token_id).int() + 2 * (ids == reader.config.video_token_id).int()
    if clips:
        given |= {"pixel_values_videos": torch.cat(values), "video_grid_thw": torch.tensor(grids)}
        if "2_5" in reader.config.model_type:
            given["second_per_grid_ts"] = torch.tensor([2 / RATE] * len(clips))
    with torch.no_grad():
        out = reader.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), mm_token_type_ids=kinds, **given,
            max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
    return [int(each) for each in out[0, ids.shape[1] :]]


TIMED: dict[str, Any] = {"do_resize": False, "patch_size": 4, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
"""Settings of an image processor that makes Qwen3-VL's pixels of frames that are resized."""


def resized(clip: list[Any], count: int) -> list[Any]:
    """The frames of a clip of so many in the size that Qwen3VLVideoProcessor gives them."""
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize

    height, width = smart_resize(count, *clip[0].shape[:2], factor=8, min_pixels=4 * 64, max_pixels=40 * 64)
    return [Image.fromarray(frame).resize((width, height), Image.Resampling.BICUBIC) for frame in clip]


def timed(count: int, rate: float, squares: int) -> str:
    """What vLLM and transformers 4 write for a video of so many frames in the place of its token and those around it;
    transformers 5 keeps these as well."""
    from transformers import Qwen3VLProcessor

    times = Qwen3VLProcessor._calculate_timestamps(None, list(range(count)), rate)
    pads = "<|placeholder|>" * squares
    return "".join(f"<{time:.1f} seconds><|vision_start|>{pads}<|vision_end|>" for time in times)


def from_the_largest(get_rope_index: Callable[..., Any]) -> Callable[..., Any]:
    """Positions of transformers 5 with those behind a video going on from the largest of its times, rows and columns,
    as in vLLM's `get_mrope_input_positions` and transformers 4."""
    import torch

    def corrected(input_ids: Any, mm_token_type_ids: Any, **rest: Any) -> tuple[Any, Any]:
        positions, _ = get_rope_index(input_ids, mm_token_type_ids, **rest)
        kinds, begin = mm_token_type_ids[0], 0
        changes = (kinds.diff().nonzero().flatten() + 1).tolist()
        for group in torch.arange(len(kinds)).tensor_split(changes):
            positions[:, 0, group] += begin - positions[:, 0, group].min()
            begin = positions[:, 0, group].max() + 1
        return positions, (begin - len(kinds)).view(1, 1)

    return corrected


def prompt(text: str, clips: Sequence[int], images: int) -> dict[str, Any]:
    data: dict[str, Any] = {"video": [(CLIPS[each], {"fps": RATE}) for each in clips]}
    return {"prompt": text, "multi_modal_data": data | {"image": [picture(40, 30, each) for each in range(images)]}}


def greedy(llm: LLM, prompts: Sequence[Any]) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    return [list(each.outputs[0].token_ids) for each in llm.generate(list(prompts), params, use_tqdm=False)]


def test_answers_equal_those_of_transformers_with_videos_and_images(llm: LLM, expected: list[list[int]]) -> None:
    prompts = [prompt(*each) for each in PROMPTS]
    assert greedy(llm, prompts) == expected
    assert greedy(llm, prompts) == expected  # from the prefix cache


def test_preempted_requests_see_their_videos_again(model: Path, expected: list[list[int]]) -> None:
    with LLM(
        str(model), dtype="float32", block_size=8, num_gpu_blocks_override=28, enable_prefix_caching=False,
        max_model_len=200, preemption_mode="recompute", disable_log_stats=False,
    ) as llm:  # fmt: skip
        assert greedy(llm, [prompt(*each) for each in PROMPTS] * 2) == expected * 2
        assert {metric.name: metric for metric in llm.get_metrics()}["vllm:num_preemptions"].value > 0


def file_of_frames(frames: Frames, rate: int = 4, kind: str = "matroska") -> bytes:
    """A video as a file that keeps all bits of its frames."""
    import av

    buffer = io.BytesIO()
    with av.open(buffer, "w", format=kind) as file:
        stream = file.add_stream("ffv1" if kind == "matroska" else "mpeg4", rate=rate)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "bgr0" if kind == "matroska" else "yuv420p"
        for frame in frames:
            file.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        file.mux(stream.encode())
    return buffer.getvalue()


def url(content: bytes) -> str:
    return f"data:video/x-matroska;base64,{base64.b64encode(content).decode()}"


@pytest.mark.parametrize("model", ["2", "2_5"], indirect=True)
def test_files_and_conversations_show_frames_at_the_rate_that_is_asked_for(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    clip = frames_of(16, 24, 16, 7)
    link = url(file_of_frames(clip))
    parts = [{"type": "video_url", "video_url": {"url": link}}, {"type": "text", "text": "What?"}]
    (at_two,) = llm.chat([{"role": "user", "content": parts}], params, use_tqdm=False)
    asked = {"prompt": at_two.prompt, "multi_modal_data": {"video": link}}
    at_four = llm.generate(asked | {"mm_processor_kwargs": {"fps": 4}}, params, use_tqdm=False)[0]
    six = llm.generate(asked | {"mm_processor_kwargs": {"num_frames": 6}}, params, use_tqdm=False)[0]
    for found, frames, rate in ((at_two, clip[::2], 2), (at_four, clip, 4), (six, clip[[0, 2, 5, 8, 10, 13]], 1.5)):
        given = {"prompt": at_two.prompt, "multi_modal_data": {"video": (frames, {"fps": rate})}}
        (same,) = llm.generate(given, params, use_tqdm=False)
        assert found.prompt_token_ids == same.prompt_token_ids
        assert found.outputs[0].token_ids == same.outputs[0].token_ids


@pytest.mark.parametrize("model", ["2", "2_5"], indirect=True)
def test_videos_that_cannot_be_read_or_are_too_long_are_refused(llm: LLM) -> None:
    whole = file_of_frames(CLIPS[0])
    refused: list[tuple[Any, dict[str, Any], str]] = [
        (url(whole[:200]), {}, "cannot be read|no video|no frames"),
        (url(b""), {}, "its type is not known"),
        (url(b"GIF89a"), {}, "cannot be read|no frames|pixels"),
        (url(file_of_frames(CLIPS[0], kind="avi")[:3000]), {}, "cannot be read|no frames"),
        ("ftp://a", {}, "no URL of a video"),
        ("http://127.0.0.1/a.mp4", {}, "allowed-media-domains"),
        (CLIPS[0][0], {}, "frames, height, width"),
        ((CLIPS[0], {"fps": -1}), {}, "positive number"),
        (url(file_of_frames(np.repeat(CLIPS[1], 30, axis=0))), {"fps": 4}, "more than 512 tokens"),
        (url(whole), {"fps": "x"}, "fps is 'x'"),
        (url(whole), {"num_frames": 0}, "num_frames is 0"),
        (url(whole), {"fps": 1, "num_frames": 4}, "leave one of them out"),
        (url(whole), {"max_pixels": 31 * 64}, "31 tokens, and this server's have 30"),
    ]
    for given, settings, message in refused:
        asked = {"prompt": VIDEO, "multi_modal_data": {"video": given}, "mm_processor_kwargs": settings}
        with pytest.raises(RequestError, match=message):
            llm.generate(asked, use_tqdm=False)
    with pytest.raises(RequestError, match="2 placeholders for videos and 1 videos"):
        llm.generate({"prompt": VIDEO * 2, "multi_modal_data": {"video": CLIPS[0]}}, use_tqdm=False)


@pytest.mark.parametrize("model", ["3"], indirect=True)
def test_texts_tell_when_the_frames_of_a_file_are(llm: LLM) -> None:
    """16 frames at 4 a second, of which 8 are seen, or those that a request asks for."""
    link = url(file_of_frames(frames_of(16, 24, 16, 7)))
    params = SamplingParams(temperature=0, max_tokens=1)
    for settings, times in (
        ({}, ("0.2", "1.2", "2.5", "3.5")),
        ({"fps": 1}, ("0.6", "3.1")),
        ({"num_frames": 3}, ("1.0", "3.8")),
    ):
        asked = {"prompt": f"a {VIDEO} b {VIDEO}", "multi_modal_data": {"video": [link, link]}}
        (found,) = llm.generate(asked | {"mm_processor_kwargs": settings}, params, use_tqdm=False)
        shown = (
            llm.get_tokenizer().decode(found.prompt_token_ids, skip_special_tokens=False).replace("<|video_pad|>", "")
        )
        slices = "".join(f"<{time} seconds><|vision_start|><|vision_end|>" for time in times)
        assert shown == f"a {slices} b {slices}"
    with pytest.raises(RequestError, match="with the checkpoint's settings"):
        llm.generate(asked | {"mm_processor_kwargs": {"max_pixels": 640}}, params, use_tqdm=False)


@pytest.mark.parametrize(
    ("frames", "rate", "settings"),
    [(100, 25.0, {}), (100, 25.0, {"fps": 1}), (7, 30.0, {}), (1, 30.0, {}), (90_000, 30.0, {}),
     (101, 24.0, {"num_frames": 13}), (5, 24.0, {"num_frames": 9}), (5000, 29.97, {"fps": 3.5, "max_frames": 99})],
)  # fmt: skip
def test_frames_and_sizes_of_timed_videos_are_those_of_transformers(
    frames: int, rate: float, settings: dict[str, Any]
) -> None:
    from types import SimpleNamespace

    from transformers.models.qwen3_vl import video_processing_qwen3_vl as theirs

    bounds = {"min_frames": 4, "max_frames": 768} | settings
    fields = {name: bounds.pop(name) for name in ("min_frames", "max_frames")}
    metadata, own = SimpleNamespace(total_num_frames=frames, fps=rate), SimpleNamespace(fps=2, **fields)
    expected = theirs.Qwen3VLVideoProcessor.sample_frames(own, metadata, **bounds)
    layout = VideoLayout(5, (3, 4), PixelValues(None, None, None), 16, 2)
    spec = ModuleVisionSpec("", "", 1, 1, 48, 1, 1, 1, 1, merge=2, video=layout)
    videos = TimedVideos(spec, 512, replaced=settings)
    found = videos.frames_of(VideoLength(frames, rate))
    assert found == expected.tolist()
    count, processor = max(2, len(found)), videos._processor(len(found))
    for width, height in ((640, 360), (20, 700), (1920, 1080), (5, 9)):
        size = theirs.smart_resize(count, height, width, 2, 32, 128 * 32 * 32, 768 * 32 * 32)
        picture = processor.picture(Image.new("RGB", (width, height)))
        assert picture.pixels.shape[:2] == size


@pytest.mark.parametrize(
    ("frames", "rate", "settings", "count"),
    [(100, 25.0, {}, 8), (100, 25.0, {"fps": 1}, 4), (7, 30.0, {}, 4), (3, 30.0, {}, 2), (1, 30.0, {}, 1),
     (90_000, 30.0, {}, 768), (101, 24.0, {"num_frames": 13}, 12), (5000, 29.97, {"fps": 3.5, "max_frames": 99}, 98)],
)  # fmt: skip
def test_frames_are_those_that_transformers_chooses(
    frames: int, rate: float, settings: dict[str, Any], count: int
) -> None:
    """As many as Qwen2VLVideoProcessor.sample_frames says, whose module needs torchvision, at equal distances."""
    import torch

    spec = QwenVisionSpec.__new__(QwenVisionSpec)
    object.__setattr__(spec, "frames", 2)
    found = QwenVideos(spec, 512, replaced=settings).frames_of(VideoLength(frames, rate))
    assert found == torch.arange(0, frames, frames / count).int().tolist()
