"""Encoders through the engine: many short texts in one step, each whole, against transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM
from quire.compute.kernels.cpu import linear
from quire.errors import ContextLengthError, RequestError
from tests.checkpoints import make_tiny, write_tokenizer
from tests.models.pooled import texts
from tests.models_sweep.pooled_rows import POOLED_ROWS

MEAN = {"pooling_type": "MEAN", "normalize": True}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers with windows and without, whose tables differ."""
    row = POOLED_ROWS["ModernBertModel"] | {"max_position_embeddings": 96}
    made = make_tiny(tmp_path_factory.mktemp("modernbert"), "ModernBertModel", **row)
    write_tokenizer(made)
    return made


@pytest.fixture(scope="module")
def llm(directory: Path) -> Iterator[LLM]:
    with LLM(str(directory), dtype="float32", pooler_config=MEAN, max_num_seqs=3, max_num_batched_tokens=100) as engine:
        yield engine


@torch.inference_mode()
def test_embeddings_of_mixed_lengths_are_transformers(llm: LLM, directory: Path) -> None:
    """More texts than one step holds; some have 1 token, some 96."""
    import transformers

    reference = transformers.ModernBertModel.from_pretrained(directory, dtype=torch.float32).eval()
    batch = [row.tolist() for row in [*texts(), *texts()]] + [[7] * 96, [9]]
    outputs = llm.embed([{"prompt_token_ids": text} for text in batch])
    for text, output in zip(batch, outputs, strict=True):
        expected = reference(torch.tensor([text])).last_hidden_state[0].mean(0)
        near = torch.cosine_similarity(torch.tensor(output.outputs.embedding), expected, dim=0)
        assert near > 0.999999


@pytest.mark.parametrize(("settings", "rounds"), [({"pooler_config": MEAN}, True), ({"runner": "generate"}, False)])
def test_weights_are_rounded_where_no_text_is_generated(
    settings: dict[str, Any], rounds: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A causal model reads texts in many rows, too, but its single tokens wait for memory."""
    made = make_tiny(tmp_path, "Qwen3ForCausalLM")
    write_tokenizer(made)
    asked = []
    monkeypatch.setattr(linear, "pack_rounded", lambda weight: asked.append(weight) or linear.pack_linear(weight))
    with LLM(str(made), dtype="bfloat16", **settings):
        assert bool(asked) == rounds


def test_texts_beyond_the_longest_are_refused(llm: LLM) -> None:
    with pytest.raises(ContextLengthError, match=r"97.*96"):
        llm.embed([{"prompt_token_ids": [7] * 97}])


def test_encoders_generate_nothing(llm: LLM) -> None:
    with pytest.raises(RequestError, match="generates none"):
        llm.generate("hello")


@torch.inference_mode()
def test_scores_of_pairs_are_those_of_a_cross_encoder(tmp_path: Path) -> None:
    """The second text of a pair is of another type, from vocab.txt to the model."""
    import transformers

    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh", *(f"##{letter}" for letter in "abcdefgh")]
    row = POOLED_ROWS["BertForSequenceClassification"] | {"num_labels": 1, "vocab_size": len(pieces)}
    directory = make_tiny(tmp_path, "BertForSequenceClassification", **row)
    (directory / "vocab.txt").write_text("\n".join(pieces) + "\n")
    (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    reference = transformers.BertForSequenceClassification.from_pretrained(directory, dtype=torch.float32).eval()
    query, documents = "abc de", ["a", "bad cab", "face " * 9, "hedge"]
    with LLM(str(directory), dtype="float32") as llm:
        scores = [output.outputs.score for output in llm.score(query, documents)]
    for score, document in zip(scores, documents, strict=True):
        encoded = tokenizer(query, document, return_tensors="pt")
        assert encoded["token_type_ids"].max() == 1
        assert abs(score - float(reference(**encoded).logits.sigmoid())) < 1e-5
