"""Encoders and classifiers that transformers' modules compute: texts of mixed lengths in one step, and one by one."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire import LLM
from quire.errors import CheckpointError, ConfigError, SetupError
from quire.foundation.config import environment
from quire.models.fallback.encoder import FallbackEncoder
from quire.models.spec import read_spec
from tests.checkpoints import TINY, edit_config, make_tiny
from tests.models.pooled import near, texts

_BERT: dict[str, Any] = {"num_key_value_heads": None, "pad_token_id": 1, "num_labels": 3, "max_position_embeddings": 96}
_DEBERTA = _BERT | {
    "relative_attention": True,
    "pos_att_type": ["c2p", "p2c"],
    "position_buckets": 16,
    "max_relative_positions": -1,
    "position_biased_input": False,
    "type_vocab_size": 2,
    "pad_token_id": 0,
}
_T5 = {"d_model": 48, "d_kv": 12, "d_ff": 80, "num_layers": 2, "num_heads": 4, "relative_attention_num_buckets": 8}
CASES: dict[str, dict[str, Any]] = {
    "MPNetModel": _BERT,
    "MPNetForTokenClassification": _BERT,
    "DebertaV2Model": _DEBERTA,
    "DebertaV2ForSequenceClassification": _DEBERTA,
    "T5EncoderModel": _T5 | {"relative_attention_max_distance": 24},
}
"""Biases by distance, disentangled attention, and both kinds of head; `make test-models` has other encoders."""
MEAN = {"pooling_type": "MEAN", "normalize": False}


@pytest.fixture(autouse=True)
def _own_descriptions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "fallback_cache", lambda: tmp_path / "descriptions")


def serving(directory: Path, **settings: Any) -> LLM:
    given: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_model_len": 80, "skip_tokenizer_init": True}
    return LLM(str(directory), **given | {"kv_cache_memory_bytes": 8 << 20} | settings)


def found_in(llm: LLM, rows: list[Tensor], **options: Any) -> list[Tensor]:
    """The model's first task of texts."""
    asked = [{"prompt_token_ids": row.tolist()} for row in rows]
    return [torch.as_tensor(each.outputs.data) for each in llm.encode(asked, use_tqdm=False, **options)]


@pytest.mark.parametrize("architecture", CASES)
@torch.inference_mode()
def test_outputs_equal_transformers(architecture: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    import transformers

    caplog.set_level(logging.INFO)
    directory = make_tiny(tmp_path / "model", architecture, **CASES[architecture])
    reference = getattr(transformers, architecture).from_pretrained(directory, dtype=torch.float32).eval()
    spec, rows = read_spec(directory), texts()
    assert spec.fallback is not None
    assert spec.fallback.tier == "whole"
    assert spec.two_sided
    assert not spec.generates
    embeds = spec.text_head is None
    with serving(directory, pooler_config=MEAN if embeds else {"use_activation": False}) as llm:
        for row, own in zip(rows, found_in(llm, rows), strict=True):
            output = reference(row[None])
            other = output.last_hidden_state.mean(1)[0] if embeds else output.logits[0]
            near(own, other, 2e-5)
    assert "load check  outputs differ" in caplog.text
    assert "unpadded" not in caplog.text


@torch.inference_mode()
def test_the_encoder_is_taken_of_two_halves(tmp_path: Path) -> None:
    """sentence-transformers reads T5Model so; the decoder's weights are left out."""
    import transformers

    directory = make_tiny(tmp_path / "model", "T5Model", **CASES["T5EncoderModel"])
    reference = transformers.T5EncoderModel.from_pretrained(directory, dtype=torch.float32).eval()
    rows = texts()
    with serving(directory, pooler_config=MEAN) as llm:
        for row, own in zip(rows, found_in(llm, rows), strict=True):
            near(own, reference(row[None]).last_hidden_state.mean(1)[0], 2e-5)


def test_natively_served_encoders_are_the_same(tmp_path: Path) -> None:
    """With types of tokens, which only the second half of a pair has."""
    row = _BERT | {"pad_token_id": 0, "num_labels": 1, "type_vocab_size": 2}
    directory, values = make_tiny(tmp_path / "model", "BertForSequenceClassification", **row), []
    rows = [{"prompt_token_ids": row.tolist(), "token_type_ids": [0] + [1] * (len(row) - 1)} for row in texts()]
    for impl in ("quire", "transformers"):
        with serving(directory, model_impl=impl) as llm:
            values.append(torch.cat([torch.as_tensor(each.outputs.data) for each in llm.encode(rows, use_tqdm=False)]))
    near(values[1], values[0])
    assert len(values[0].unique()) == len(rows)


def test_texts_that_padding_changes_are_computed_in_batches_of_equal_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a model that is wrong even then is refused, with the figure."""
    import transformers

    directory = make_tiny(tmp_path / "model", "MPNetModel", **_BERT)
    reference = transformers.MPNetModel.from_pretrained(directory, dtype=torch.float32).eval()
    compute = FallbackEncoder._compute

    def spoilt(self: FallbackEncoder, tokens: Tensor, types: Tensor | None, place: Any, kept: Any) -> Tensor:
        return compute(self, tokens, types, place, kept) * (1.0 if kept.all() else 1.5)

    monkeypatch.setattr(FallbackEncoder, "_compute", spoilt)
    rows = [*texts(), *(row[:-1] for row in texts()[1:])]
    with serving(directory, pooler_config=MEAN) as llm, torch.inference_mode():
        for row, own in zip(rows, found_in(llm, rows), strict=True):
            near(own, reference(row[None]).last_hidden_state.mean(1)[0], 2e-5)
    monkeypatch.setattr(FallbackEncoder, "_compute", lambda *given: compute(*given) * torch.rand(()))
    with pytest.raises((CheckpointError, SetupError), match="in batches, what it makes of texts differs by"):
        serving(directory, pooler_config=MEAN)


def test_what_has_no_pooling_is_told_how_to_get_one(tmp_path: Path) -> None:
    directory = make_tiny(tmp_path / "model", "MPNetModel", **_BERT)
    with pytest.raises((ConfigError, SetupError), match="--pooler-config"):
        serving(directory)


@pytest.mark.parametrize("architecture", ["MPNetForMaskedLM", "MPNetForQuestionAnswering"])
def test_other_heads_are_refused(architecture: str, tmp_path: Path) -> None:
    directory = make_tiny(tmp_path / "model", "MPNetModel", **_BERT)
    edit_config(directory, {"architectures": [architecture]})
    with pytest.raises(CheckpointError, match="a causal language model, an encoder or a classifier"):
        read_spec(directory)


def test_positions_begin_behind_padding(tmp_path: Path) -> None:
    spec = read_spec(make_tiny(tmp_path / "model", "MPNetModel", **_BERT))
    assert spec.max_model_len == 96 - 2
    assert spec.vocab_size == TINY["vocab_size"]
