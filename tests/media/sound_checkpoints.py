"""Tiny checkpoints of models that hear, with the files that published ones have, and sounds for them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.checkpoints import TINY, VOCAB_SIZE
from tests.media.checkpoints import write_model

RATE = 16_000
MARKS = {"qwen2_audio": "<|AUDIO|>", "qwen3_asr": "<|audio_pad|>", "voxtral": "[AUDIO]"}
"""By model type, the text of the token that stands for a sound."""
AROUND = {"qwen2_audio": ("<|audio_bos|>", "<|audio_eos|>"), "qwen3_asr": ("<|audio_start|>", "<|audio_end|>"),
          "voxtral": ("[BEGIN_AUDIO]", "[INST]")}  # fmt: skip
_TEMPLATE = (
    "{{% for message in messages %}}<|im_start|>{{{{ message['role'] }}}}\n"
    "{{% if message['content'] is string %}}{{{{ message['content'] }}}}{{% else %}}"
    "{{% for content in message['content'] %}}"
    "{{% if 'audio' in content or 'audio_url' in content %}}{mark}"
    "{{% elif 'text' in content %}}{{{{ content['text'] }}}}{{% endif %}}{{% endfor %}}{{% endif %}}<|im_end|>\n"
    "{{% endfor %}}{{% if add_generation_prompt %}}<|im_start|>assistant\n{{% endif %}}"
)
_MELS = 16


def make_hearing(directory: Path, kind: str, *, seed: int = 0) -> Path:
    """Write a model that hears, of a model type of `MARKS`, with random weights, its tokenizer, chat template and
    processor."""
    import transformers

    directory.mkdir(parents=True, exist_ok=True)
    text = TINY | {"vocab_size": VOCAB_SIZE + 8, "eos_token_id": None, "head_dim": 12, "max_position_embeddings": 2048}
    audio: dict[str, Any] = {"num_mel_bins": _MELS}
    if kind == "voxtral":
        audio |= {"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    else:
        audio |= {"d_model": 16, "encoder_ffn_dim": 24, "encoder_layers": 2, "encoder_attention_heads": 2}
    if kind == "qwen3_asr":
        audio |= {"downsample_hidden_size": 8, "output_dim": TINY["hidden_size"]}
        text |= {"tie_word_embeddings": True}
    audio["max_position_embeddings" if kind == "qwen3_asr" else "max_source_positions"] = (
        13 if kind == "qwen3_asr" else 1500
    )
    name = {"qwen2_audio": "Qwen2Audio", "qwen3_asr": "Qwen3ASR", "voxtral": "Voxtral"}[kind]
    config_class = getattr(transformers, f"{name}Config")
    token = "audio_token_index" if kind == "qwen2_audio" else "audio_token_id"
    config = config_class(audio_config=audio, text_config=text, **{token: VOCAB_SIZE})
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    write_model(model, directory, seed, (MARKS[kind], *AROUND[kind]), _TEMPLATE.format(mark=MARKS[kind]))
    named = zip(("audio_token", "audio_bos_token", "audio_eos_token"), (MARKS[kind], *AROUND[kind]), strict=True)
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps(settings | {"extra_special_tokens": dict(named)}))
    extractor = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": _MELS, "sampling_rate": RATE}
    extractor |= {"feature_extractor_type": "Qwen3ASRFeatureExtractor"} if kind == "qwen3_asr" else {}
    extractor |= {"hop_length": 160, "n_fft": 400, "chunk_length": 30, "return_attention_mask": True}
    extractor |= {"processor_class": f"{name}Processor"}
    (directory / "preprocessor_config.json").write_text(json.dumps(extractor))
    return directory


def sound(seconds: float, seed: int = 0) -> NDArray[np.float32]:
    """A sound whose tones change slowly, so that no two parts of it are alike."""
    rng, time = np.random.default_rng(seed), np.arange(int(seconds * RATE)) / RATE
    tones = [np.sin(2 * np.pi * (rate * time + 20 * time**2)) for rate in rng.uniform(100, 2000, 5)]
    return np.asarray(sum(tones) * 0.1 + rng.normal(0, 0.01, len(time)), dtype=np.float32)


def file_of_sound(samples: NDArray[np.float32], kind: str = "WAV") -> bytes:
    """A sound as a file."""
    import soundfile

    buffer = io.BytesIO()
    soundfile.write(buffer, samples, RATE, format=kind)
    return buffer.getvalue()
