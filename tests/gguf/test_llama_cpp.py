"""llama.cpp beside us, on files that its own quantizer made: logits and token ids.

Compiling it takes too long for every run: it is used where QUIRE_LLAMA_CPP names an interpreter that has
llama-cpp-python (benchmarks/cpu/compare.py --install makes one).
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire import builtin
from quire.compute.gguf.header import read_header
from quire.compute.gguf.model_files import directory_of
from quire.compute.gguf.tokenizer_files import tokenizer_files
from quire.text.tokenizer import load_tokenizer
from tests.checkpoints import make_llama, make_tiny
from tests.gguf import made
from tests.gguf.test_tokenizer_files import TEXTS, noise, spm_metadata
from tests.models.forward import logits_of
from tests.quantization.test_gguf import FAMILIES, WIDE
from tests.text.test_tokenizer import LLAMA_2, train_spm

_PYTHON = os.environ.get("QUIRE_LLAMA_CPP", "")
pytestmark = pytest.mark.skipif(not _PYTHON, reason="QUIRE_LLAMA_CPP names no interpreter with llama-cpp-python")
TOKENS = torch.randint(3, 320, (60,), generator=torch.Generator().manual_seed(4))
TYPES = ("F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_M", "Q6_K",
         "IQ4_NL", "IQ4_XS")  # fmt: skip
EXACT = 2e-5
"""Where weights are fp32."""
TABLE = 5e-4
"""Of Gemma: llama.cpp looks gelu up in a table of fp16."""
ROUNDED = 0.06
"""llama.cpp rounds activations to 8 bits, or to the weights' 16 bits; weights are random."""


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.compute.kernels.cpu.library import library

    library()  # from the usual cache
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def run(*arguments: object) -> None:
    script = Path(__file__).with_name("llama_cpp_answers.py")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [_PYTHON, script, *map(str, arguments)], capture_output=True, text=True, env=environment, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]


def their_logits(file: Path) -> torch.Tensor:
    tokens, out = file.with_suffix(".json"), file.with_suffix(".npy")
    tokens.write_text(json.dumps(TOKENS.tolist()))
    run("logits", file, tokens, out)
    return torch.from_numpy(np.load(out))


def assert_agree(file: Path, bound: float) -> None:
    ours = logits_of(directory_of([file], tokenizer=False), TOKENS, torch.float32)
    theirs = their_logits(file)[:, : ours.shape[1]]
    error = float(torch.linalg.vector_norm(ours - theirs) / torch.linalg.vector_norm(theirs))
    assert error < bound
    clear = theirs.topk(2).values.diff().abs()[:, 0] > 4 * error * theirs.std()
    assert torch.equal(ours.argmax(1)[clear], theirs.argmax(1)[clear])
    assert int(clear.sum()) > len(TOKENS) // 2 or bound != EXACT


def vocabulary_size(dense: Path) -> dict[str, Any]:
    config = json.loads((dense / "config.json").read_text())
    return {f"{made._ARCHITECTURES[config['architectures'][0]][0]}.vocab_size": config["vocab_size"]}


@pytest.mark.parametrize("types", TYPES)
@torch.inference_mode()
def test_every_type_has_its_logits(types: str, tmp_path: Path) -> None:
    dense = make_llama(tmp_path / "model", **WIDE, std=0.05)
    source = made.make_gguf(dense, tmp_path / "source.gguf", metadata=vocabulary_size(dense))
    target = tmp_path / "target.gguf"
    run("quantize", source, target, types)
    assert_agree(target, ROUNDED)


ITS_OWN: dict[str, dict[str, Any]] = {
    "phi3": {"sliding_window": 400},  # it leaves Phi-3's window out
    "phi3, longrope": {"original_max_position_embeddings": 512},  # it chooses factors by the context's size
}


@pytest.mark.parametrize("case", FAMILIES)
@torch.inference_mode()
def test_every_family_has_its_logits(case: str, tmp_path: Path) -> None:
    shape = {"hidden_size": 64, "intermediate_size": 96} | FAMILIES[case] | ITS_OWN.get(case, {})
    dense = make_tiny(tmp_path / "model", **shape)
    source = made.make_gguf(dense, tmp_path / "source.gguf", metadata=vocabulary_size(dense))
    assert_agree(source, TABLE if case.startswith("gemma") else EXACT)
    if case in ("mixtral", "qwen3 moe"):
        return  # rounded routers choose other experts
    target = tmp_path / "target.gguf"
    run("quantize", source, target, "Q8_0")
    assert_agree(target, ROUNDED)


def assert_same_ids(file: Path, texts: Sequence[str], tmp_path: Path) -> None:
    asked, out, ours = tmp_path / "texts.json", tmp_path / "ids.json", tmp_path / "ours"
    asked.write_text(json.dumps(texts))
    run("tokens", file, asked, out)
    ours.mkdir()
    for name, content in tokenizer_files(read_header(file).metadata).items():
        (ours / name).write_bytes(content)
    tokenizer = load_tokenizer(ours)
    for text, ids in zip(texts, json.loads(out.read_text()), strict=True):
        assert tokenizer.encode(text) == ids, text


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "smollm", "dbrx", "smaug-bpe"])
def test_byte_pair_encodings_have_its_ids(pre: str, tmp_path: Path) -> None:
    dense = make_llama(tmp_path / "model", **WIDE)
    metadata = made._vocabulary(builtin.path("quill")) | {"tokenizer.ggml.pre": pre, "tokenizer.ggml.bos_token_id": 5}
    file = made.make_gguf(dense, tmp_path / "vocabulary.gguf", metadata=metadata)
    assert_same_ids(file, [*TEXTS, *noise("abc DÑé 1234 's'LL \n\t.,!<|>日本")], tmp_path)


@pytest.mark.parametrize("extra", [{}, {"add_space_prefix": False}, {"add_eos_token": True, "add_bos_token": False}])
def test_sentencepiece_has_its_ids(extra: dict[str, Any], tmp_path: Path) -> None:
    dense = make_llama(tmp_path / "model", **WIDE)
    metadata = spm_metadata(train_spm(tmp_path, "bpe", **LLAMA_2))
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in extra.items()}
    file = made.make_gguf(dense, tmp_path / "vocabulary.gguf", metadata=metadata)
    assert_same_ids(file, [*TEXTS, *noise("abcdefghij  éß 你\n"), "<s>a</s> b"], tmp_path)
