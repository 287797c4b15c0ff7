"""Makes a Hugging Face directory of a Whisper checkpoint in CTranslate2's format (model.bin, version 6)."""

from __future__ import annotations

import io
import json
import shutil
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Arrays = dict[str, NDArray[Any]]

_DTYPES = (np.float32, np.int8, np.int16, np.int32, np.float16)
_ATTENTION = ("q_proj", "k_proj", "v_proj")


def write_whisper(source: Path, directory: Path) -> Path:
    """Write config, generation config, tokenizer and weights in float32 of the checkpoint in `source`."""
    import torch
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    stored = read_arrays((source / "model.bin").read_bytes())
    weights = dict(_renamed(stored))
    tensors = {name: torch.from_numpy(array.astype(np.float32)) for name, array in weights.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((source / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(_config(stored, weights)))
    (directory / "generation_config.json").write_text(json.dumps(_generation(settings)))
    (directory / "preprocessor_config.json").write_text(
        json.dumps({"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 80})
    )
    shutil.copy(source / "tokenizer.json", directory / "tokenizer.json")
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"})
    )
    return directory


def read_arrays(content: bytes) -> Arrays:
    """Return the arrays of a model.bin by their names."""
    file = io.BytesIO(content)

    def number(form: str) -> int:
        value: int = struct.unpack(f"<{form}", file.read(struct.calcsize(form)))[0]
        return value

    def text() -> str:
        return file.read(number("H"))[:-1].decode()

    version, kind, _ = number("I"), text(), number("I")
    assert (version, kind) == (6, "WhisperSpec"), (version, kind)
    arrays: Arrays = {}
    for _ in range(number("I")):
        name = text()
        shape = [number("I") for _ in range(number("B"))]
        dtype, size = _DTYPES[number("B")], number("I")
        arrays[name] = np.frombuffer(file.read(size), dtype).reshape(shape)
    return arrays


def _layers(stored: Mapping[str, Any], side: str) -> int:
    numbers = {name.split("/")[1].removeprefix("layer_") for name in stored if name.startswith(f"{side}/layer_")}
    return len([number for number in numbers if number.isdigit()])


def _renamed(stored: Arrays) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield the arrays under transformers' names; projections that are stored as one are taken apart."""

    def linear(to: str, of: str) -> Iterator[tuple[str, NDArray[Any]]]:
        yield f"{to}.weight", stored[f"{of}/weight"]
        yield f"{to}.bias", stored[f"{of}/bias"]

    def norm(to: str, of: str) -> Iterator[tuple[str, NDArray[Any]]]:
        yield f"{to}.weight", stored[f"{of}/gamma"]
        yield f"{to}.bias", stored[f"{of}/beta"]

    def several(to: str, of: str, names: tuple[str, ...]) -> Iterator[tuple[str, NDArray[Any]]]:
        weights, biases = (np.split(stored[f"{of}/{part}"], len(names)) for part in ("weight", "bias"))
        for name, weight, bias in zip(names, weights, biases, strict=True):
            yield f"{to}.{name}.weight", weight
            if name == "k_proj":
                assert not bias.any(), "keys have no bias"
            else:
                yield f"{to}.{name}.bias", bias

    yield "model.decoder.embed_tokens.weight", stored["decoder/embeddings/weight"]
    for number in (1, 2):
        yield from linear(f"model.encoder.conv{number}", f"encoder/conv{number}")
    for side in ("encoder", "decoder"):
        yield f"model.{side}.embed_positions.weight", stored[f"{side}/position_encodings/encodings"]
        yield from norm(f"model.{side}.layer_norm", f"{side}/layer_norm")
        for number in range(_layers(stored, side)):
            to, of = f"model.{side}.layers.{number}", f"{side}/layer_{number}"
            yield from norm(f"{to}.self_attn_layer_norm", f"{of}/self_attention/layer_norm")
            yield from several(f"{to}.self_attn", f"{of}/self_attention/linear_0", _ATTENTION)
            yield from linear(f"{to}.self_attn.out_proj", f"{of}/self_attention/linear_1")
            if side == "decoder":
                yield from norm(f"{to}.encoder_attn_layer_norm", f"{of}/attention/layer_norm")
                yield from several(f"{to}.encoder_attn", f"{of}/attention/linear_0", _ATTENTION[:1])
                yield from several(f"{to}.encoder_attn", f"{of}/attention/linear_1", _ATTENTION[1:])
                yield from linear(f"{to}.encoder_attn.out_proj", f"{of}/attention/linear_2")
            yield from norm(f"{to}.final_layer_norm", f"{of}/ffn/layer_norm")
            yield from linear(f"{to}.fc1", f"{of}/ffn/linear_0")
            yield from linear(f"{to}.fc2", f"{of}/ffn/linear_1")


def _config(stored: Arrays, weights: Arrays) -> dict[str, Any]:
    vocab, width = weights["model.decoder.embed_tokens.weight"].shape
    heads, end = width // 64, 50256
    return {
        "architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper", "vocab_size": vocab,
        "d_model": width, "num_mel_bins": weights["model.encoder.conv1.weight"].shape[1],
        "encoder_layers": _layers(stored, "encoder"), "decoder_layers": _layers(stored, "decoder"),
        "encoder_attention_heads": heads, "decoder_attention_heads": heads,
        "encoder_ffn_dim": 4 * width, "decoder_ffn_dim": 4 * width,
        "max_source_positions": len(weights["model.encoder.embed_positions.weight"]),
        "max_target_positions": len(weights["model.decoder.embed_positions.weight"]),
        "decoder_start_token_id": end + 1, "eos_token_id": end, "bos_token_id": end, "pad_token_id": end,
        "suppress_tokens": None, "begin_suppress_tokens": None, "torch_dtype": "float32",
    }  # fmt: skip


def _generation(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the generation config of a model of English, as its makers' is."""
    end = 50256
    return {
        "decoder_start_token_id": end + 1, "eos_token_id": end, "bos_token_id": end, "pad_token_id": end,
        "no_timestamps_token_id": 50362, "prev_sot_token_id": 50360, "max_initial_timestamp_index": 50,
        "max_length": 448, "is_multilingual": False, "return_timestamps": False,
        "suppress_tokens": settings["suppress_ids"], "begin_suppress_tokens": settings["suppress_ids_begin"],
    }  # fmt: skip
