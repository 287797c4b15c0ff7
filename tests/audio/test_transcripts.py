"""/v1/audio/transcriptions and /v1/audio/translations, answered by a real engine and compared with transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch

from tests.api.server import Server, running, serving
from tests.audio.checkpoints import END, IDS, RATE, SECONDS, TIMESTAMP, file_of, make_whisper, sound

SHORT, LONG = sound(SECONDS * 0.7, seed=1), sound(SECONDS * 2.6, seed=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_whisper(tmp_path_factory.mktemp("whisper") / "model")


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    with serving(model, block_size=8, max_num_seqs=4) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client:
        yield client


def segments_of(model: Path, samples: Any, **options: Any) -> list[dict[str, Any]]:
    """What transformers' `generate` makes of a sound, with timestamps."""
    from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

    reader = WhisperForConditionalGeneration.from_pretrained(model, dtype=torch.float32).eval()
    extractor = WhisperFeatureExtractor.from_pretrained(model)
    inputs = extractor(
        samples, sampling_rate=RATE, return_tensors="pt", truncation=False, padding="longest",
        return_attention_mask=True,
    )  # fmt: skip
    with torch.no_grad():
        found = reader.generate(**inputs, return_timestamps=True, return_segments=True, **options)
    segments: list[dict[str, Any]] = found["segments"][0]
    return segments


def tokens_of(model: Path, samples: Any, **options: Any) -> list[int]:
    """What transformers' `generate` makes of a short sound, without timestamps."""
    from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

    reader = WhisperForConditionalGeneration.from_pretrained(model, dtype=torch.float32).eval()
    extractor = WhisperFeatureExtractor.from_pretrained(model)
    features = extractor(
        samples, sampling_rate=RATE, return_tensors="pt", max_length=int(RATE * SECONDS)
    ).input_features
    with torch.no_grad():
        found: list[int] = reader.generate(features, force_unique_generate_call=True, **options)[0].tolist()
    return [token for token in found if token < END]


def text_of(server: Server, tokens: list[int]) -> str:
    assert server.text.tokenizer is not None
    return server.text.tokenizer.decode([token for token in tokens if token < END]).strip()


@pytest.mark.parametrize("task", ["transcribe", "translate"])
def test_a_short_transcript_is_that_of_transformers(
    server: Server, client: openai.OpenAI, model: Path, task: str
) -> None:
    route: Any = client.audio.transcriptions if task == "transcribe" else client.audio.translations
    more = {"language": "de"} if task == "transcribe" else {"extra_body": {"language": "de"}}
    answer = route.create(model="tiny", file=("a.wav", file_of(SHORT, subtype="FLOAT")), **more)
    assert answer.text == text_of(server, tokens_of(model, SHORT, language="de", task=task))
    assert answer.text


def test_the_language_is_that_which_transformers_hears(client: openai.OpenAI, model: Path) -> None:
    from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

    reader = WhisperForConditionalGeneration.from_pretrained(model, dtype=torch.float32).eval()
    extractor, heard = WhisperFeatureExtractor.from_pretrained(model), set[str]()
    names = {IDS["<|en|>"]: "english", IDS["<|de|>"]: "german", IDS["<|fr|>"]: "french"}
    for seed in range(4):
        samples = sound(SECONDS, seed=seed)
        features = extractor(samples, sampling_rate=RATE, return_tensors="pt", max_length=len(samples)).input_features
        expected = names[int(reader.detect_language(features)[0])]
        answer = client.audio.transcriptions.create(
            model="tiny", file=file_of(samples, subtype="FLOAT"), response_format="verbose_json"
        )
        assert answer.language == expected
        heard.add(expected)
    assert len(heard) > 1


@pytest.mark.parametrize("samples", [SHORT, LONG], ids=["short", "long"])
@pytest.mark.parametrize("prompt", [None, "Hello, how are you?"])
def test_segments_are_those_of_transformers(
    server: Server, client: openai.OpenAI, model: Path, samples: Any, prompt: str | None
) -> None:
    """Over several pieces, each of which begins where the last one has ended."""
    more: dict[str, Any] = {}
    if prompt is not None:
        from quire.text.tokenizer import load_tokenizer

        told = load_tokenizer(model).encode(" " + prompt, add_special_tokens=False)
        more["prompt_ids"] = torch.tensor([IDS["<|startofprev|>"], *told])
    expected = segments_of(model, samples, language="fr", task="transcribe", **more)
    answer = client.audio.transcriptions.create(
        model="tiny", file=file_of(samples, subtype="FLOAT"), language="fr", response_format="verbose_json",
        timestamp_granularities=["segment"], prompt=prompt or openai.omit,
    )  # fmt: skip
    assert answer.segments
    assert [each.tokens for each in answer.segments] == [each["tokens"].tolist() for each in expected]
    for ours, theirs in zip(answer.segments, expected, strict=True):
        assert abs(ours.start - float(theirs["start"])) < 0.011
        assert abs(ours.end - float(theirs["end"])) < 0.011
    assert answer.text == text_of(server, [token for each in expected for token in each["tokens"].tolist()])
    assert answer.duration == pytest.approx(len(samples) / RATE, abs=0.01)
    assert all(any(token >= TIMESTAMP for token in each.tokens) for each in answer.segments)
    assert 0 < answer.segments[0].no_speech_prob < 1
    assert answer.segments[0].avg_logprob < 0


def test_captions_have_the_times_of_segments(client: openai.OpenAI) -> None:
    def ask(kind: Any) -> Any:
        return client.audio.transcriptions.create(
            model="tiny", file=file_of(LONG, subtype="FLOAT"), language="en", response_format=kind
        )

    whole, srt, vtt, text = ask("verbose_json"), ask("srt"), ask("vtt"), ask("text")
    assert vtt.startswith("WEBVTT\n\n")
    assert srt.count(" --> ") == vtt.count(" --> ") == len(whole.segments)
    first, last = whole.segments[0], whole.segments[-1]
    assert f"00:00:{first.start:06.3f} --> 00:00:{first.end:06.3f}" in vtt
    assert f"00:00:{last.start:06.3f} --> 00:00:{last.end:06.3f}".replace(".", ",") in srt
    assert srt.startswith("1\n")
    assert text.strip() == whole.text


@pytest.mark.parametrize("samples", [SHORT, LONG], ids=["short", "long"])
def test_a_stream_says_what_the_whole_answer_says(client: openai.OpenAI, samples: Any) -> None:
    def ask(**more: Any) -> Any:
        return client.audio.transcriptions.create(model="tiny", file=file_of(samples), language="en", **more)

    whole = ask().text
    events = list(ask(stream=True, extra_body={"stream_include_usage": True}))
    assert [event.type for event in events] == ["transcript.text.delta"] * (len(events) - 1) + ["transcript.text.done"]
    assert len(events) > 2
    assert "".join(event.delta for event in events[:-1]).strip() == events[-1].text == whole
    assert events[-1].usage.output_tokens > 0


def test_what_is_sampled_follows_the_seed(client: openai.OpenAI) -> None:
    def ask(seed: int) -> str:
        extra = {"seed": seed, "top_k": 40}
        answer = client.audio.transcriptions.create(
            model="tiny", file=file_of(SHORT), language="en", temperature=1.0, extra_body=extra
        )
        return answer.text

    assert ask(1) == ask(1) != ask(2)


WRONG = {
    "no file": ({"model": "tiny"}, None, "file"),
    "an empty file": ({"model": "tiny"}, b"", "file"),
    "no sound": ({"model": "tiny"}, b"a text", "file"),
    "another model": ({"model": "large"}, file_of(SHORT), "model"),
    "a language": ({"language": "klingon"}, file_of(SHORT), "language"),
    "a format": ({"response_format": "xml"}, file_of(SHORT), "response_format"),
    "words": (
        {"response_format": "verbose_json", "timestamp_granularities[]": "word"},
        file_of(SHORT),
        "timestamp_granularities",
    ),
    "times without segments": ({"timestamp_granularities[]": "segment"}, file_of(SHORT), "timestamp_granularities"),
    "a stream of captions": ({"stream": "true", "response_format": "srt"}, file_of(SHORT), "response_format"),
    "a temperature": ({"temperature": "hot"}, file_of(SHORT), "temperature"),
    "a low temperature": ({"temperature": "-1"}, file_of(SHORT), "temperature"),
    "a field": ({"temprature": "1"}, file_of(SHORT), "temprature"),
    "beams": ({"use_beam_search": "true"}, file_of(SHORT), "use_beam_search"),
    "speakers": ({"known_speaker_names[]": "me"}, file_of(SHORT), "known_speaker_names"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_is_wrong_is_named(server: Server, kind: str) -> None:
    fields, content, param = WRONG[kind]
    files = {"other": (None, "x")} if content is None else {"file": ("a.wav", content)}
    answer = server.http.post(f"{server.url}/v1/audio/transcriptions", data=fields, files=files)
    assert 400 <= answer.status_code < 500, answer.text
    error = answer.json()["error"]
    assert str(error["param"]).startswith(param), error


def test_texts_are_refused_by_a_model_that_hears(server: Server) -> None:
    answer = server.post("/v1/completions", {"model": "tiny", "prompt": "Hello"})
    assert answer.status_code == 400
    assert "/v1/audio/transcriptions" in answer.json()["error"]["message"]


def test_sounds_are_refused_by_a_model_that_reads(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        answer = server.http.post(f"{server.url}/v1/audio/transcriptions", files={"file": ("a.wav", file_of(SHORT))})
    assert answer.status_code == 400
    assert "whisper" in answer.json()["error"]["message"]


def test_large_files_are_refused(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_MAX_AUDIO_CLIP_FILESIZE_MB", "0.01")
    answer = server.http.post(f"{server.url}/v1/audio/transcriptions", files={"file": ("a.wav", file_of(LONG))})
    assert answer.status_code == 400
    assert "VLLM_MAX_AUDIO_CLIP_FILESIZE_MB" in json.loads(answer.text)["error"]["message"]


def test_silence_and_noise_come_to_an_end(server: Server) -> None:
    """Whatever timestamps a model writes, the next piece begins behind the one before."""
    noise = np.random.default_rng(0).standard_normal(int(3.2 * RATE)).astype(np.float32) * 0.3
    for samples in (np.zeros(int(2.5 * RATE), np.float32), noise):
        answer = server.http.post(f"{server.url}/v1/audio/transcriptions", files={"file": ("a.wav", file_of(samples))})
        assert answer.status_code == 200, answer.text
    counted = re.search(r"^quire:audio_seconds_total\{.*\} (.+)$", server.get("/metrics").text, re.MULTILINE)
    assert counted is not None
    assert float(counted[1]) >= 2.5 + 3.2
