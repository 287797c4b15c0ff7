"""Whisper tiny.en on recordings, against transformers on the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.media.audio_decode import decode_audio
from tests.api.server import Server, serving
from tests.real_weights.ctranslate2 import write_whisper
from tests.real_weights.packages import RECORDINGS, WHISPER

pytestmark = pytest.mark.long("engine")
NAMES = ("beckett.wav", "endgame_nagg_nell.wav", "two_cities.wav")
RATE, PIECE = 16_000, 30 * 16_000
END, TIMESTAMP = 50_256, 50_363


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    RECORDINGS.directory()  # skips where they are not
    return write_whisper(WHISPER.directory(), tmp_path_factory.mktemp("whisper") / "tiny.en")


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    with serving(model, max_num_seqs=4) as server:
        yield server


@pytest.fixture(scope="module")
def reader(model: Path) -> Any:
    from transformers import WhisperForConditionalGeneration

    return WhisperForConditionalGeneration.from_pretrained(model, dtype=torch.float32).eval()


def ask(server: Server, name: str, **fields: str) -> Any:
    files = {"file": (name, (RECORDINGS.directory() / name).read_bytes())}
    answer = server.http.post(f"{server.url}/v1/audio/transcriptions", data=fields, files=files, timeout=300)
    assert answer.status_code == 200, answer.text
    return answer.json()


def heard(model: Path, reader: Any, name: str, *, whole: bool) -> list[dict[str, Any]]:
    """The segments of a recording by transformers: as a `whole` with timestamps, or as one piece without."""
    from transformers import WhisperFeatureExtractor

    samples = decode_audio((RECORDINGS.directory() / name).read_bytes(), RATE)
    extractor = WhisperFeatureExtractor.from_pretrained(model)
    options: dict[str, Any] = {"sampling_rate": RATE, "return_tensors": "pt"}
    with torch.inference_mode():
        if not whole:
            found = reader.generate(extractor(samples, **options).input_features)
            return [{"tokens": found[0]}]
        inputs = extractor(samples, truncation=False, padding="longest", return_attention_mask=True, **options)
        segments: list[dict[str, Any]] = reader.generate(**inputs, return_timestamps=True, return_segments=True)[
            "segments"
        ][0]
        return segments


def text_of(server: Server, segments: list[dict[str, Any]]) -> str:
    assert server.text.tokenizer is not None
    tokens = [token for segment in segments for token in segment["tokens"].tolist() if token < END]
    return server.text.tokenizer.decode(tokens).strip()


@pytest.mark.parametrize("name", NAMES)
def test_transcripts_are_those_of_transformers(server: Server, model: Path, reader: Any, name: str) -> None:
    is_long = name == NAMES[2]
    text = ask(server, name)["text"]
    assert text == text_of(server, heard(model, reader, name, whole=is_long))
    assert len(text.split()) > 10
    segments = heard(model, reader, name, whole=True)
    answer = ask(server, name, response_format="verbose_json")
    assert answer["text"] == text_of(server, segments)
    assert len(answer["segments"]) == len(segments)
    for ours, theirs in zip(answer["segments"], segments, strict=True):
        assert abs(ours["start"] - float(theirs["start"])) < 0.1
        assert abs(ours["end"] - float(theirs["end"])) < 0.1
        assert ours["no_speech_prob"] < 0.5
    assert answer["language"] == "english"
