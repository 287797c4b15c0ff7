"""Texts whose vectors are made of a head's values of all their tokens: SPLADE, ColBERT, and labels by late pooling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire import LLM, PoolingParams
from quire.errors import ConfigError, SetupError
from quire.runtime.worker import pooling
from tests.checkpoints import edit_config, make_tiny
from tests.models.pooled import near, texts
from tests.models_sweep.pooled_rows import POOLED_ROWS

_PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh", *(f"##{letter}" for letter in "abcdefgh")]
_WORDS = ["abc de", "a", "bad cab bag", "face " * 9 + "hedge"]


def with_vocabulary(directory: Path, architecture: str) -> Path:
    """A tiny BERT with a tokenizer."""
    from transformers import AutoTokenizer

    made = make_tiny(directory, architecture, **POOLED_ROWS[architecture] | {"vocab_size": len(_PIECES)})
    (made / "vocab.txt").write_text("\n".join(_PIECES) + "\n")
    (made / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    AutoTokenizer.from_pretrained(made).save_pretrained(made)
    return made


@pytest.fixture
def few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of 5 tokens at a time, so that texts lie in several parts, and parts in several texts."""
    monkeypatch.setattr(pooling, "_LOGITS", 5 * len(_PIECES))


@pytest.mark.parametrize(("strategy", "activation"), [("max", "relu"), ("sum", "log1p_relu")])
def test_splade_is_that_of_sentence_transformers(
    strategy: Any, activation: Any, tmp_path: Path, few_at_once: None
) -> None:
    """As it saves its own models; scores are products of vectors."""
    from sentence_transformers import SparseEncoder
    from sentence_transformers.sparse_encoder.modules import SpladePooling, Transformer

    base = with_vocabulary(tmp_path / "base", "BertForMaskedLM")
    modules = [
        Transformer(str(base), transformer_task="fill-mask"),
        SpladePooling(pooling_strategy=strategy, activation_function=activation),
    ]
    SparseEncoder(modules=modules, device="cpu").save(str(tmp_path / "saved"))
    expected = SparseEncoder(str(tmp_path / "saved"), device="cpu").encode(_WORDS, batch_size=1).to_dense()
    with LLM(str(tmp_path / "saved"), dtype="float32") as llm:
        found = torch.tensor([each.outputs.embedding for each in llm.embed(_WORDS, use_tqdm=False)])
        scores = [each.outputs.score for each in llm.score(_WORDS[0], _WORDS[1:], use_tqdm=False)]
    near(found, expected)
    np.testing.assert_allclose(scores, expected[1:] @ expected[0], rtol=1e-5)
    assert (expected > 0).any()


@pytest.mark.parametrize(
    "settings",
    [
        {"pooler_config": {"pooling_type": "SPLADE"}},
        {"hf_overrides": {"architectures": ["BertSpladeSparseEmbeddingModel"]}},
    ],
    ids=str,
)
@torch.inference_mode()
def test_splade_without_files_is_asked_for(settings: dict[str, Any], tmp_path: Path) -> None:
    """By --pooler-config, or by vLLM's architecture; vectors of a prompt's tokens are those of a text's."""
    import transformers

    directory = with_vocabulary(tmp_path, "BertForMaskedLM")
    reference = transformers.BertForMaskedLM.from_pretrained(directory, dtype=torch.float32).eval()
    rows = [row % len(_PIECES) for row in texts()]
    with LLM(str(directory), dtype="float32", **settings) as llm:
        outputs = llm.embed([{"prompt_token_ids": row.tolist()} for row in rows], use_tqdm=False)
    for row, output in zip(rows, outputs, strict=True):
        expected = reference(row[None]).logits[0].relu().log1p().amax(0)
        near(torch.tensor(output.outputs.embedding), expected)


def test_splade_of_models_without_such_logits_is_refused(tmp_path: Path) -> None:
    directory = with_vocabulary(tmp_path, "BertModel")
    with pytest.raises((ConfigError, SetupError), match="has no logits of masked tokens"):
        LLM(str(directory), pooler_config={"pooling_type": "SPLADE"})


@torch.inference_mode()
def test_colbert_has_vectors_of_tokens(tmp_path: Path) -> None:
    """As Stanford's checkpoints have it: a BERT and `linear.weight`, which says how long vectors are."""
    import transformers
    from safetensors.torch import load_file, save_file

    directory = with_vocabulary(tmp_path, "BertModel")
    reference = transformers.BertModel.from_pretrained(directory, dtype=torch.float32).eval()
    linear = torch.randn(24, 48, generator=torch.Generator().manual_seed(1))
    stored = {f"bert.{name}": tensor for name, tensor in load_file(directory / "model.safetensors").items()}
    save_file(stored | {"linear.weight": linear}, directory / "model.safetensors")
    edit_config(directory, {"architectures": ["HF_ColBERT"]})
    rows = texts()

    def vectors(row: Tensor) -> Tensor:
        states = reference((row % len(_PIECES))[None]).last_hidden_state[0]
        return torch.nn.functional.normalize(states @ linear.T, dim=-1)

    with LLM(str(directory), dtype="float32") as llm:
        asked = [{"prompt_token_ids": (row % len(_PIECES)).tolist()} for row in rows]
        found = llm.encode(asked, pooling_task="token_embed", use_tqdm=False)
        for row, output in zip(rows, found, strict=True):
            near(torch.as_tensor(output.outputs.data), vectors(row))
        ids = [llm.get_tokenizer().encode(words) for words in _WORDS]
        scores = [each.outputs.score for each in llm.score(_WORDS[0], _WORDS[1:], use_tqdm=False)]
    query, *documents = (vectors(torch.tensor(row)) for row in ids)
    expected = [float((query @ document.T).amax(1).sum()) for document in documents]
    np.testing.assert_allclose(scores, expected, rtol=1e-4)


@torch.inference_mode()
def test_labels_by_late_pooling_are_those_of_transformers(tmp_path: Path) -> None:
    import transformers

    row = POOLED_ROWS["EuroBertForSequenceClassification"] | {"classifier_pooling": "late"}
    directory = make_tiny(tmp_path, "EuroBertForSequenceClassification", **row)
    reference = transformers.EuroBertForSequenceClassification.from_pretrained(directory, dtype=torch.float32).eval()
    rows = texts()
    with LLM(str(directory), dtype="float32", skip_tokenizer_init=True) as llm:
        asked = [{"prompt_token_ids": row.tolist()} for row in rows]
        found = llm.classify(asked, pooling_params=PoolingParams(use_activation=False), use_tqdm=False)
    for row, output in zip(rows, found, strict=True):
        near(torch.tensor(output.outputs.probs), reference(row[None]).logits[0])
