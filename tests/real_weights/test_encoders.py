"""Real encoders against transformers and sentence-transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from quire.text.tokenizer import load_tokenizer
from tests.models.forward import load, states_of_rows
from tests.real_weights.packages import FINE_TUNED_MINILM, MINILM, REACTIONS, SPLADE, Package

TEXTS = [
    "hello world",
    "The quick brown fox jumps over the lazy dog. " * 12,
    "Pods crash loop back off when the readiness probe fails",
    "x",
    "naïve café Ünïcödé 你好 世界 🙂",
    "SELECT name, age FROM people WHERE age > 42 ORDER BY name;",
]
pytestmark = pytest.mark.long("engine")


@pytest.mark.parametrize("package", [MINILM, FINE_TUNED_MINILM], ids=lambda package: package.name)
@pytest.mark.parametrize(("dtype", "least"), [(torch.float32, 0.999999), (torch.bfloat16, 0.9999)])
@torch.inference_mode()
def test_embeddings_are_those_of_sentence_transformers(package: Package, dtype: torch.dtype, least: float) -> None:
    from sentence_transformers import SentenceTransformer

    directory = package.directory()
    tokenizer, loaded = load_tokenizer(directory), load(directory, dtype)
    rows = [torch.tensor(tokenizer.encode(text)) for text in TEXTS]
    ours = torch.stack([states.float().mean(0) for states in states_of_rows(loaded, rows)])
    theirs = SentenceTransformer(str(directory), device="cpu").encode(TEXTS, convert_to_tensor=True)
    assert torch.cosine_similarity(ours, theirs).min() >= least


@torch.inference_mode()
def test_weights_of_tokens_are_those_of_transformers() -> None:
    """As SPLADE pools them: the largest log(1 + max(logit, 0)) of a text's positions, for each token."""
    from transformers import BertForMaskedLM

    directory = SPLADE.directory()
    tokenizer, loaded = load_tokenizer(directory), load(directory)
    reference = BertForMaskedLM.from_pretrained(directory, dtype=torch.float32).eval()
    rows = [torch.tensor(tokenizer.encode(text)) for text in TEXTS]
    for row, states in zip(rows, states_of_rows(loaded, rows), strict=True):
        ours, theirs = (_pooled(logits) for logits in (loaded.model.logits(states), reference(row[None]).logits[0]))
        assert (ours - theirs).abs().max() < 1e-5


@torch.inference_mode()
def test_labels_of_reactions_are_those_of_transformers(tmp_path: Path) -> None:
    """200 texts, which are random tokens."""
    from transformers import BertForSequenceClassification

    pickled = REACTIONS.directory() / "bert_ft_10k_25s"
    weights = torch.load(pickled / "pytorch_model.bin", weights_only=True, map_location="cpu")
    save_file({name: weight.contiguous() for name, weight in weights.items()}, tmp_path / "model.safetensors")
    config = json.loads((pickled / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "bert"}))
    loaded = load(tmp_path)
    reference = BertForSequenceClassification.from_pretrained(tmp_path, num_labels=50, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(5, 80, (200,), generator=generator).tolist()
    rows = [torch.randint(10, 590, (length,), generator=generator) for length in lengths]
    ours = torch.cat([loaded.model.logits(states[:1]) for states in states_of_rows(loaded, rows)])
    theirs = torch.cat([reference(row[None]).logits for row in rows])
    assert ours.shape == (200, 50)
    assert (ours - theirs).abs().max() < 1e-5 * theirs.abs().max()
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


def _pooled(logits: Tensor) -> Tensor:
    return logits.relu().log1p().max(0).values
