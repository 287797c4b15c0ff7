"""A tiny configuration of every architecture that makes vectors or values of texts.

`make test-models` runs them all, and writes docs/models.md.
"""

from __future__ import annotations

from typing import Any

LABELS = {"num_labels": 3}
_BERT: dict[str, Any] = {"num_key_value_heads": None, "pad_token_id": 0, **LABELS}
_ROBERTA = _BERT | {"pad_token_id": 1, "max_position_embeddings": 90, "type_vocab_size": 1}
_XLM_ROBERTA = _ROBERTA | {"pad_token_id": 5}
_DISTILBERT: dict[str, Any] = {"dim": 48, "hidden_dim": 80, "n_layers": 2, "n_heads": 4, **LABELS}
_ELECTRA = _BERT | {"embedding_size": 32}
_ALBERT = _BERT | {"embedding_size": 32, "num_hidden_layers": 3}
_MODERNBERT = _BERT | {
    "num_hidden_layers": 4,
    "local_attention": 12,
    "cls_token_id": 1,
    "sep_token_id": 2,
    "classifier_pooling": "mean",
    "classifier_bias": True,
    "norm_bias": True,
    "attention_bias": True,
    "mlp_bias": True,
}
_EUROBERT = {"classifier_pooling": "mean", **LABELS}
_DECODER = {"head_dim": 16, **LABELS}
_GEMMA: dict[str, Any] = _DECODER | {
    "num_hidden_layers": 2,
    "sliding_window": 12,
    "layer_types": ["sliding_attention", "full_attention"],
}
_GTE = _BERT | {"type_vocab_size": 2}
_HEADS = ("Model", "ForSequenceClassification", "ForTokenClassification")


def _rows(prefix: str, row: dict[str, Any], heads: tuple[str, ...] = _HEADS) -> dict[str, dict[str, Any]]:
    return {f"{prefix}{head}": row for head in heads}


_MASKED = (*_HEADS, "ForMaskedLM")
POOLED_ROWS: dict[str, dict[str, Any]] = {
    **_rows("Bert", _BERT, _MASKED),
    "HF_ColBERT": _BERT,
    **_rows("Roberta", _ROBERTA, _MASKED),
    **_rows("XLMRoberta", _XLM_ROBERTA, _MASKED),
    **_rows("Camembert", _ROBERTA, _MASKED),
    **_rows("DistilBert", _DISTILBERT, _MASKED),
    **_rows("Electra", _ELECTRA, _MASKED),
    **_rows("Albert", _ALBERT, _MASKED),
    **_rows("ModernBert", _MODERNBERT, _MASKED),
    **_rows("NomicBert", _BERT),
    **_rows("Gte", _GTE),
    **_rows("New", _GTE | {"like": "Gte"}),
    **_rows("EuroBert", _EUROBERT),
    **_rows("Llama", LABELS),
    **_rows("Mistral", LABELS | {"sliding_window": 45}),
    **_rows("Qwen2", LABELS),
    **_rows("Qwen3", _DECODER),
    **_rows("Gemma", _DECODER),
    **_rows("Gemma2", _GEMMA),
    "Gemma3TextModel": _GEMMA | {"use_bidirectional_attention": True},
    "Gemma3TextForSequenceClassification": _GEMMA,
    "LlamaBidirectionalModel": {"like": "Llama"},
    "LlamaBidirectionalForSequenceClassification": LABELS | {"like": "Llama"},
    "Qwen2ForRewardModel": LABELS | {"like": "Qwen2"},
    "Qwen2ForProcessRewardModel": LABELS | {"like": "Qwen2"},
}
"""By architecture. What is `like` others has no class in transformers: its checkpoints are made from one of those."""
