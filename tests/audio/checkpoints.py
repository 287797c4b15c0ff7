"""Tiny Whisper checkpoints with random weights, with the files that published ones have, and sounds for them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.checkpoints import VOCAB_SIZE, write_tokenizer

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Samples = NDArray[np.float32]

RATE = 16_000
LENGTH = 50
"""States of the encoder, of a second of sound."""
SECONDS = 2 * LENGTH * 160 / RATE
MARKS = (
    "<|endofspeech|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|fr|>", "<|translate|>", "<|transcribe|>",
    "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>",
)  # fmt: skip
"""Special tokens, whose ids follow the vocabulary's."""
IDS = {mark: VOCAB_SIZE + number for number, mark in enumerate(MARKS)}
START, NO_TIMESTAMPS = IDS["<|startoftranscript|>"], IDS["<|notimestamps|>"]
TIMES = 1 + int(SECONDS / 0.02)
"""How many timestamps there are."""
TIMESTAMP = VOCAB_SIZE + len(MARKS)
"""The first timestamp."""
END = IDS["<|endofspeech|>"]
SUPPRESSED, NOT_FIRST = [5, 7, 11], [9, END]


def make_whisper(directory: Path, *, seed: int = 0, multilingual: bool = True, **config: Any) -> Path:
    """Write a Whisper with random weights, its tokenizer, generation config and feature extractor."""
    import torch
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    directory.mkdir(parents=True, exist_ok=True)
    sizes: dict[str, Any] = {
        "vocab_size": TIMESTAMP + TIMES, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
        "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 40,
        "num_mel_bins": 80, "max_source_positions": LENGTH, "max_target_positions": 96, "decoder_start_token_id": START,
        "pad_token_id": END, "bos_token_id": END, "eos_token_id": END, "suppress_tokens": None,
        "begin_suppress_tokens": None, **config,
    }  # fmt: skip
    model = WhisperForConditionalGeneration(WhisperConfig(**sizes))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            is_norm = bool((parameter == 1.0).all())
            parameter.normal_(1.0 if is_norm else 0.0, 0.25, generator=generator)
    model.save_pretrained(directory)
    write_generation_config(directory, multilingual=multilingual)
    _write_tokenizer(directory)
    settings = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 80, "sampling_rate": RATE,
                "hop_length": 160, "n_fft": 400, "chunk_length": 1}  # fmt: skip
    (directory / "preprocessor_config.json").write_text(json.dumps(settings))
    return directory


def write_generation_config(directory: Path, *, multilingual: bool = True) -> None:
    """Write what `generate` needs for transcripts."""
    values: dict[str, Any] = {
        "decoder_start_token_id": START, "eos_token_id": END, "pad_token_id": END, "bos_token_id": END,
        "no_timestamps_token_id": NO_TIMESTAMPS, "prev_sot_token_id": IDS["<|startofprev|>"],
        "max_initial_timestamp_index": 10, "max_length": 96, "suppress_tokens": SUPPRESSED,
        "begin_suppress_tokens": NOT_FIRST, "is_multilingual": multilingual,
    }  # fmt: skip
    if multilingual:
        values["lang_to_id"] = {mark: IDS[mark] for mark in MARKS[2:5]}
        values["task_to_id"] = {"translate": IDS["<|translate|>"], "transcribe": IDS["<|transcribe|>"]}
    (directory / "generation_config.json").write_text(json.dumps(values))


def _write_tokenizer(directory: Path) -> None:
    from tokenizers import AddedToken, Tokenizer

    write_tokenizer(directory)
    (directory / "chat_template.jinja").unlink()
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    missing = VOCAB_SIZE - tokenizer.get_vocab_size()
    tokenizer.add_special_tokens([f"<|unused{number}|>" for number in range(missing)])
    tokenizer.add_special_tokens(list(MARKS))
    times = [f"<|{number * 0.02:.2f}|>" for number in range(TIMES)]
    tokenizer.add_tokens([AddedToken(time, normalized=False, special=False) for time in times])
    assert tokenizer.token_to_id("<|0.00|>") == TIMESTAMP
    tokenizer.save(str(directory / "tokenizer.json"))
    file = directory / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token": MARKS[0], "bos_token": MARKS[0]}))


def sound(seconds: float = SECONDS, seed: int = 0, rate: int = RATE) -> Samples:
    """Tones that come and go."""
    random, time = np.random.default_rng(seed), np.arange(int(seconds * rate)) / rate
    tones = [np.sin(2 * np.pi * hertz * time) * np.sin(2 * np.pi * slow * time + hertz)
             for hertz, slow in zip(random.uniform(100, 3000, 6), random.uniform(0.3, 4, 6), strict=True)]  # fmt: skip
    noise = random.standard_normal(len(time)) * 0.02
    return np.asarray(0.1 * np.sum(tones, axis=0) + noise, np.float32)


def file_of(samples: Samples, rate: int = RATE, kind: str = "WAV", **options: Any) -> bytes:
    """Samples as a file."""
    import soundfile

    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, format=kind, **options)
    return buffer.getvalue()
