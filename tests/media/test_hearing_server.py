"""Sounds and videos in the bodies of chats, answered by a real engine, and some that mean harm."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from quire.engine.build import build_model_runtime_info
from quire.engine.inprocess import InProcessClient
from quire.engine.thinking_budgets import bitmask_source
from quire.foundation.clock import SystemClock
from quire.foundation.config import Config
from quire.planning.auto_config import resolve
from quire.runtime.executor.factory import build_executor
from tests.api.server import Server
from tests.media.checkpoints import file_of, make_qwen, picture
from tests.media.sound_checkpoints import RATE, file_of_sound, make_hearing, sound
from tests.media.test_video import CLIPS, file_of_frames, url

WAV = file_of_sound(sound(0.7))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = make_hearing(tmp_path_factory.mktemp("heard") / "model", "qwen2_audio")
    with serving(model) as server:
        yield server


@pytest.fixture(scope="module")
def video_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(make_qwen(tmp_path_factory.mktemp("seen") / "model", "2_5")) as server:
        yield server


@contextmanager
def serving(model: Path) -> Iterator[Server]:
    asked = Config().with_values(
        model=str(model), dtype="float32", served_model_name=("tiny",), max_model_len=512, block_size=8,
        limit_mm_per_prompt={"audio": 2, "video": 1}, disable_log_stats=True,
    )  # fmt: skip
    found = resolve(asked)
    clock, info = SystemClock(), build_model_runtime_info(found.config, found.spec)
    masker = bitmask_source(found.config, found.spec.vocab_size)

    def client() -> InProcessClient:
        return InProcessClient(found.config, build_executor(found.config, clock), clock, info, masker)

    with Server(found.config, client, vocab_size=found.spec.vocab_size) as server:
        yield server.wait_ready()


def chat(*parts: Any, **more: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {
        "model": "tiny", "messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 8, **more,
    }  # fmt: skip


def heard(content: bytes, kind: str = "wav") -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(content).decode(), "format": kind}}


def test_the_official_client_sends_sounds(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    (model,) = client.models.list().data
    assert model.model_dump()["input_modalities"] == ["text", "audio"]
    answers = [
        client.chat.completions.create(**chat(heard(content), "What?"), logprobs=True)  # type: ignore[call-overload]
        for content in (WAV, file_of_sound(sound(0.7, 5)), WAV)
    ]
    tokens = [[each.logprob for each in found.choices[0].logprobs.content] for found in answers]
    assert tokens[0] == pytest.approx(tokens[2], abs=1e-4)
    assert tokens[0] != pytest.approx(tokens[1], abs=1e-4)


def test_sounds_that_cannot_be_read_are_named(server: Server) -> None:
    long = file_of_sound(np.zeros(31 * RATE, np.float32), "FLAC")
    refused: list[tuple[dict[str, Any], str]] = [
        (heard(b"RIFF0000WAVEfmt "), "cannot be read"),
        (heard(WAV[:60]), "shorter than 0.1 s"),
        (heard(file_of(picture())), "its type is not known"),
        (heard(b""), "its type is not known"),
        (heard(long), "longer than 30 s"),
        ({"type": "input_audio", "input_audio": {"data": 5}}, "must be a text in base64"),
        ({"type": "input_audio", "input_audio": {"data": "a b", "format": "wav"}}, "not valid base64"),
        ({"type": "input_audio"}, "has no audio"),
        ({"type": "audio_url", "audio_url": {"url": "http://127.0.0.1/a.wav"}}, "allowed-media-domains"),
        ({"type": "audio_url", "audio_url": {"url": "file:///etc/passwd"}}, "allowed-local-media-path"),
        ({"type": "audio_url", "audio_url": {"url": "ftp://a"}}, "no URL of a sound"),
        ({"type": "image_url", "image_url": {"url": "data:,a"}}, "not supported yet"),
    ]
    for part, message in refused:
        found = server.post("/v1/chat/completions", chat("What?", part))
        assert (found.status_code, message in found.text) == (400, True), (part, found.text)
        assert found.json()["error"]["param"] == "messages[0].content[1]", found.text
    found = server.post("/v1/chat/completions", chat(*[heard(WAV)] * 3))
    assert (found.status_code, "at most 2 sounds" in found.text) == (400, True), found.text
    server.assert_all_free()


def seen(content: bytes) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": url(content)}}


def test_videos_are_seen_in_chats(video_server: Server) -> None:
    (model,) = video_server.get("/v1/models").json()["data"]
    assert model["input_modalities"] == ["text", "image", "video"]
    bodies = [
        chat(seen(file_of_frames(clip)), "What?", logprobs=True, **more)
        for clip, more in ((CLIPS[0], {}), (CLIPS[1], {}), (CLIPS[0], {}),
                           (CLIPS[0], {"mm_processor_kwargs": {"num_frames": 2}}))
    ]  # fmt: skip
    tokens = [video_server.post("/v1/chat/completions", body).json() for body in bodies]
    counts = [each["usage"]["prompt_tokens"] for each in tokens]
    assert counts[0] == counts[2] > counts[3]
    first, other, again = ([each["logprob"] for each in one["choices"][0]["logprobs"]["content"]] for one in tokens[:3])
    assert first == pytest.approx(again, abs=1e-4)
    assert first != pytest.approx(other, abs=1e-4)


def test_videos_that_cannot_be_read_are_named(video_server: Server) -> None:
    whole = file_of_frames(CLIPS[0])
    refused: list[tuple[dict[str, Any], str]] = [
        (seen(whole[:300]), "The video"),
        (seen(WAV), "its type is not known"),
        (seen(file_of(picture())), "its type is not known"),
        ({"type": "video_url"}, "has no video"),
        ({"type": "video_url", "video_url": {"url": "file:///etc/passwd"}}, "allowed-local-media-path"),
        (heard(WAV), "not supported yet"),
    ]
    for part, message in refused:
        found = video_server.post("/v1/chat/completions", chat("What?", part))
        assert (found.status_code, message in found.text) == (400, True), (part, found.text)
        assert found.json()["error"]["param"] == "messages[0].content[1]", found.text
    found = video_server.post("/v1/chat/completions", chat(*[seen(whole)] * 2))
    assert (found.status_code, "at most 1 videos" in found.text) == (400, True), found.text
    video_server.assert_all_free()
