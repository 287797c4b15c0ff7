"""Sounds and videos in the bodies of chats, answered by a real engine, and some that mean harm."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from functools import partial
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
from quire.models.audio.transcription import TRANSCRIBES
from quire.planning.auto_config import resolve
from quire.runtime.executor.factory import build_executor
from quire.serving.api.audio.chat_transcripts import ChatSpeech, ChatTranscript
from quire.serving.api.audio.form import TranscriptionRequest
from tests.api.server import Server
from tests.media.checkpoints import file_of, make_qwen, picture
from tests.media.sound_checkpoints import RATE, file_of_sound, make_hearing, sound
from tests.media.test_hearing import NEW_TOKENS, reference
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


PROMPTS = {
    "qwen3_asr": (
        "<|im_start|>system\n<|im_end|>\n<|im_start|>user\n<|audio_start|>{0}<|audio_end|><|im_end|>\n"
        "<|im_start|>assistant\n",
        "language German<asr_text>",
    ),
    "voxtral": ("<s>[INST][BEGIN_AUDIO]{0}[/INST][TRANSCRIBE]", "lang:de"),
}
"""As `Qwen3ASRProcessor.apply_transcription_request` and mistral-common's `encode_transcription` write them, and what
they add for a language."""


@pytest.mark.parametrize("kind", list(PROMPTS))
def test_models_of_chats_write_transcripts(kind: str, tmp_path: Path) -> None:
    """The official client's transcripts, compared with transformers' `generate` on the same prompt."""
    import soundfile
    from transformers import AutoTokenizer

    model, (prompt, language) = make_hearing(tmp_path / "model", kind), PROMPTS[kind]
    told = prompt + language if kind == "qwen3_asr" else prompt.replace("[TRANSCRIBE]", f"{language}[TRANSCRIBE]")
    samples, tokenizer = soundfile.read(io.BytesIO(WAV), dtype="float32")[0], AutoTokenizer.from_pretrained(model)
    expected = []
    for text in (prompt, told):
        tokens = reference(model, kind, text, [samples])
        tokens = tokens[: tokens.index(tokenizer.eos_token_id)] if tokenizer.eos_token_id in tokens else tokens
        expected.append(tokenizer.decode(tokens, skip_special_tokens=True).strip())
    assert expected[0] != expected[1]
    with serving(model) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
        ask: Any = partial(client.audio.transcriptions.create, model="tiny", file=("a.wav", WAV))
        more = {"extra_body": {"max_completion_tokens": NEW_TOKENS}}
        found = ask(**more)
        assert (found.text, found.usage.seconds) == (expected[0], 1)
        assert ask(language="de", response_format="text", **more) == expected[1] + "\n"
        events = list(ask(stream=True, **more))
        assert "".join(each.delta for each in events[:-1]).strip() == events[-1].text == expected[0]
        for field, value, message in (
            ("response_format", "srt", "tells no times"), ("language", "xx", "'xx' is not known"),
            ("prompt", "Hi.", "reads no prompt"), ("file", ("a.wav", WAV[:60]), "shorter than 0.1 s"),
        ):  # fmt: skip
            with pytest.raises(openai.BadRequestError, match=message) as refused:
                ask(**{field: value})
            assert refused.value.param == field
        with pytest.raises(openai.BadRequestError, match="does not translate"):
            client.audio.translations.create(model="tiny", file=("a.wav", WAV))
        server.assert_all_free()


def test_what_a_model_says_of_the_language_is_no_transcript() -> None:
    class Scripted(ChatTranscript):
        async def _gains(self) -> AsyncIterator[str]:
            for piece in pieces:
                yield piece

    async def deltas(language: str | None) -> list[str]:
        fields = TranscriptionRequest(language=language)
        return [each async for each in Scripted(speech, nothing, fields, "transcribe", {}).deltas() if each]

    nothing: Any = None
    pieces = ["language Ger", "man<asr", "_text>Guten", " Tag"]
    speech = ChatSpeech(TRANSCRIBES["Qwen3ASRForConditionalGeneration"], RATE, nothing, nothing)
    assert asyncio.run(deltas(None)) == ["Guten", " Tag"]
    assert asyncio.run(deltas("de")) == pieces  # nothing comes before the transcript, so all of it is one


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
