"""Encoders in GGUF files: weights, tokenizer, and how states are pooled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.compute.gguf.model_files import directory_of
from quire.compute.gguf.tensor_types import QUANTIZED
from quire.models.spec import read_spec
from quire.models.weights.gguf import GgufCheckpoint
from quire.text.tokenizer import load_tokenizer
from tests.checkpoints import make_tiny
from tests.models.forward import load, states_of_rows
from tests.models.pooled import near, texts

made = pytest.importorskip("tests.gguf.made", reason="needs the gguf package")
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_key_value_heads": None, "pad_token_id": 0}
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "fox", "##es", "sleep", "##s", ","]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(autouse=True, scope="module")
def _kernels_before_the_cache_moves() -> None:
    from quire.compute.kernels.cpu.library import library

    library()


@pytest.mark.parametrize("types", ["F32", "Q8_0", "F16"])
@torch.inference_mode()
def test_states_are_those_of_the_files_weights(types: str, tmp_path: Path) -> None:
    import transformers

    dense = make_tiny(tmp_path / "model", "BertModel", **SIZES)
    weights = load_file(dense / "model.safetensors")
    save_file({name: each for name, each in weights.items() if "pooler" not in name}, dense / "model.safetensors")
    file = made.make_gguf(dense, tmp_path / "made" / "model.gguf", types)
    loaded = load(directory_of([file], tokenizer=False))
    reference = transformers.BertModel.from_pretrained(dense, dtype=torch.float32, add_pooling_layer=False).eval()
    rows = texts()
    for row, own in zip(rows, states_of_rows(loaded, rows), strict=True):
        near(own, reference(row[None]).last_hidden_state[0], 1e-3 if types in QUANTIZED else 1e-5)


def test_tokenizer_and_pooling_are_read(tmp_path: Path) -> None:
    """llama.cpp's converters mark the first pieces of words in place of the others."""
    dense = make_tiny(tmp_path / "model", "BertModel", **SIZES | {"vocab_size": len(PIECES)})
    weights = load_file(dense / "model.safetensors")
    save_file({name: each for name, each in weights.items() if "pooler" not in name}, dense / "model.safetensors")
    special = len([piece for piece in PIECES if piece.startswith("[")])
    stored = [piece[2:] if piece.startswith("##") else f"\u2581{piece}" for piece in PIECES[special:]]
    vocabulary = {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": PIECES[:special] + stored,
        "tokenizer.ggml.token_type": [3] * special + [1] * len(stored),
        "tokenizer.ggml.cls_token_id": 2,
        "tokenizer.ggml.seperator_token_id": 3,
        "tokenizer.ggml.unknown_token_id": 1,
        "bert.pooling_type": 2,
    }
    file = made.make_gguf(dense, tmp_path / "made" / "model.gguf", metadata=vocabulary)
    directory = directory_of([file], tokenizer=True)
    assert load_tokenizer(directory).encode("The foxes sleep, 42") == [2, 5, 6, 7, 8, 10, 1, 3]
    assert (directory / "vocab.txt").read_text().splitlines() == PIECES
    assert json.loads((directory / "1_Pooling" / "config.json").read_text())["pooling_mode"] == "cls"
    spec = read_spec(directory)
    assert spec.token_types == 2
    assert spec.num_parameters == sum(
        torch.Size(tensor.shape).numel() for tensor in GgufCheckpoint(directory).contents().values()
    )
