"""Encoders and other models that make vectors or values of texts, against transformers'."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from quire.errors import CheckpointError
from quire.models.spec import read_spec
from tests.checkpoints import TINY, edit_config, make_tiny
from tests.models.forward import load, states_of_rows
from tests.models.pooled import make_pooled, near, outputs_of, reference_outputs, stored_weights, texts
from tests.models_sweep.pooled_rows import POOLED_ROWS

FEW = (
    "BertModel",
    "BertForMaskedLM",
    "XLMRobertaForSequenceClassification",
    "DistilBertForTokenClassification",
    "ElectraForSequenceClassification",
    "AlbertModel",
    "ModernBertForSequenceClassification",
    "NomicBertModel",
    "GteForSequenceClassification",
    "EuroBertForSequenceClassification",
    "Gemma3TextModel",
    "Qwen3ForSequenceClassification",
)
"""Each encoder once, and each kind of head; `make test-models` has all."""


@pytest.mark.parametrize("architecture", FEW)
@torch.inference_mode()
def test_outputs_equal_transformers(architecture: str, tmp_path: Path) -> None:
    directory, reference = make_pooled(tmp_path, architecture, POOLED_ROWS[architecture])
    rows, loaded = texts(), load(directory)
    for own, other in zip(outputs_of(loaded, rows), reference_outputs(reference, loaded, rows), strict=True):
        near(own, other)
    if "Masked" not in architecture:  # whose table is read twice
        assert loaded.spec.num_parameters == stored_weights(reference, loaded)


@pytest.mark.parametrize("keys", [{"is_causal": False}, {"architectures": ["LlamaBidirectionalModel"]}], ids=str)
@torch.inference_mode()
def test_decoders_may_see_both_sides(keys: dict[str, Any], tmp_path: Path) -> None:
    import transformers

    directory = make_tiny(tmp_path, "LlamaModel")
    edit_config(directory, keys)
    reference = transformers.LlamaModel.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    rows, loaded = texts(), load(directory)
    assert not loaded.spec.generates
    for row, own in zip(rows, states_of_rows(loaded, rows), strict=True):
        everything = torch.zeros(1, 1, len(row), len(row))
        near(own, reference(row[None], attention_mask=everything).last_hidden_state[0])


def test_causal_models_that_see_both_sides_generate_nothing(tmp_path: Path) -> None:
    """gte-Qwen2 is published so."""
    directory = make_tiny(tmp_path, "Qwen2ForCausalLM", num_hidden_layers=1)
    assert read_spec(directory).generates
    edit_config(directory, {"is_causal": False})
    spec = read_spec(directory)
    assert spec.two_sided
    assert not spec.generates
    load(directory)


@torch.inference_mode()
def test_old_names_of_norms_are_read(tmp_path: Path) -> None:
    """Checkpoints that TensorFlow's were converted to have gamma and beta, a prefix, and numbers of positions."""
    from safetensors.torch import load_file, save_file

    directory = make_tiny(tmp_path, "BertModel", **POOLED_ROWS["BertModel"])
    rows = texts()
    expected = states_of_rows(load(directory), rows)
    file = directory / "model.safetensors"
    renamed = {}
    for name, tensor in load_file(file).items():
        old = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        renamed[f"bert.{old}"] = tensor
    others = {"cls.predictions.bias": torch.zeros(320), "bert.embeddings.position_ids": torch.arange(512)[None]}
    save_file(renamed | others, file)
    for own, other in zip(states_of_rows(load(directory), rows), expected, strict=True):
        assert torch.equal(own, other)


def test_layers_write_over_one_anothers_keys(tmp_path: Path) -> None:
    """So that a block holds one layer, whatever windows the layers have."""
    spec = read_spec(make_tiny(tmp_path, "ModernBertModel", **POOLED_ROWS["ModernBertModel"]))
    assert [group.layers for group in spec.kv_groups()] == [(0, 3), (1, 2)]
    assert set(spec.block_parts) == {1}
    assert spec.kv_block_bytes("float32", 16) == 16 * 2 * 48 * 4
    assert spec.kv_bytes_per_token("float32") == 2 * 2 * 48 * 4


@pytest.mark.parametrize(
    ("architecture", "keys", "message"),
    [
        ("BertModel", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ("BertModel", {"is_decoder": True}, "is_decoder"),
        ("RobertaModel", {"max_position_embeddings": 1}, "max_position_embeddings"),
        ("AlbertModel", {"num_hidden_groups": 2}, "num_hidden_groups"),
        ("ModernBertModel", {"layer_types": ["full_attention", "chunked"]}, "layer_types"),
        ("EuroBertForSequenceClassification", {"classifier_pooling": "max"}, "classifier_pooling"),
        ("NomicBertModel", {"rotary_scaling_factor": 2}, "rotary_scaling_factor"),
        ("GteModel", {"rope_scaling": {"type": "ntk", "factor": 8.0}, "rope_parameters": None}, "ntk"),
        ("BertForSequenceClassification", {"id2label": {"0": "a", "2": "b"}}, "id2label"),
        ("BertForSequenceClassification", {"problem_type": "ranking"}, "problem_type"),
        ("LlamaModel", {"use_bidirectional_attention": "vision"}, "use_bidirectional_attention"),
    ],
)
def test_what_changes_the_arithmetic_is_refused(
    architecture: str, keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(TINY | {"architectures": [architecture], "dtype": "float32"} | keys)
    )
    with pytest.raises(CheckpointError, match=message):
        read_spec(tmp_path)


@torch.inference_mode()
def test_reward_models_have_a_head_of_two_products(tmp_path: Path) -> None:
    """transformers has no class of them: Qwen's own adds the head to Qwen 2."""
    import transformers
    from safetensors.torch import load_file, save_file

    directory = make_tiny(tmp_path, "Qwen2Model")
    reference = transformers.Qwen2Model.from_pretrained(directory, dtype=torch.float32)
    head = nn.Sequential(nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 2))
    for parameter in head.parameters():
        nn.init.normal_(parameter, 0.0, 0.2, generator=torch.Generator().manual_seed(1))
    tensors = {f"model.{name}": tensor for name, tensor in load_file(directory / "model.safetensors").items()}
    tensors |= {f"score.{name}": tensor for name, tensor in head.state_dict().items()}
    save_file(tensors, directory / "model.safetensors")
    edit_config(directory, {"architectures": ["Qwen2ForProcessRewardModel"]})
    rows, loaded = texts(), load(directory)
    for row, own in zip(rows, outputs_of(loaded, rows), strict=True):
        near(own, head(reference(row[None]).last_hidden_state[0]))


def test_numbers_of_labels_win_over_the_usual_names(tmp_path: Path) -> None:
    """transformers 2 wrote both."""
    config = TINY | {"architectures": ["BertForSequenceClassification"], "dtype": "float32", "num_labels": 3}
    (tmp_path / "config.json").write_text(json.dumps(config | {"id2label": {"0": "LABEL_0", "1": "LABEL_1"}}))
    head = read_spec(tmp_path).text_head
    assert head is not None
    assert head.labels == ("LABEL_0", "LABEL_1", "LABEL_2")
