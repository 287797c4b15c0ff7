"""Models that read images too: their text model is served alone, with the logits that transformers has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.errors import CheckpointError
from quire.models.families.registry import TEXT_MODELS
from quire.models.spec import read_spec
from quire.models.weights.safetensors_files import SINGLE, text_name
from tests.checkpoints import TINY, edit_config
from tests.models.forward import logits_of

VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
CASES: dict[str, dict[str, Any]] = {
    "Gemma3ForConditionalGeneration": {
        "text_config": {"model_type": "gemma3_text", "sliding_window": 8}, "mm_tokens_per_image": 4,
        "vision_config": VISION,
    },
    "LlavaForConditionalGeneration": {
        "text_config": {"model_type": "llama"}, "vision_config": {"model_type": "clip_vision_model", **VISION},
    },
    "Mistral3ForConditionalGeneration": {
        "text_config": {"model_type": "mistral", "head_dim": 16, "sliding_window": None},
        "vision_config": {"model_type": "pixtral", "head_dim": 16, **VISION},
    },
}  # fmt: skip
TOKENS = torch.randint(3, 320, (30,), generator=torch.Generator().manual_seed(4))


def make(directory: Path, architecture: str, **config: Any) -> Path:
    """A tiny checkpoint of random weights, norms among them."""
    import transformers

    case = CASES[architecture] | {"image_token_index": 319, "image_token_id": 319} | config
    model_class = getattr(transformers, architecture)
    model = model_class(model_class.config_class(**case | {"text_config": TINY | case["text_config"]}))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = "norm" in name and architecture[:5] != "Gemma"
            parameter.normal_(1.0 if is_norm else 0.0, 0.2, generator=generator)
    model.save_pretrained(directory)
    return directory


def assert_equals_transformers(directory: Path, architecture: str) -> None:
    import transformers

    with torch.inference_mode():
        ours = logits_of(directory, TOKENS, torch.float32)
        model = getattr(transformers, architecture).from_pretrained(directory, dtype=torch.float32).eval()
        theirs = model(input_ids=TOKENS.unsqueeze(0), attention_mask=torch.ones(1, 30)).logits[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("architecture", CASES)
def test_logits_equal_transformers(architecture: str, tmp_path: Path) -> None:
    assert_equals_transformers(make(tmp_path, architecture), architecture)


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_names_of_either_generation(prefix: str, tmp_path: Path) -> None:
    directory = make(tmp_path, "Gemma3ForConditionalGeneration")
    stored = load_file(directory / SINGLE)
    texts = {name: text for name in stored if (text := text_name(name)) is not None}
    assert {
        text for text in texts.values() if not text.startswith(("model.layers.", "model.norm.", "model.embed_tokens."))
    } == set()
    assert 0 < len(texts) < len(stored)
    renamed = {f"{prefix}{text.removeprefix('model.')}": stored[name] for name, text in texts.items()}
    expected = logits_of(directory, TOKENS, torch.float32)
    save_file({"vision_tower.a.weight": torch.zeros(2), **renamed}, directory / SINGLE)
    assert torch.equal(logits_of(directory, TOKENS, torch.float32), expected)


def test_a_head_of_its_own(tmp_path: Path) -> None:
    directory = make(tmp_path, "LlavaForConditionalGeneration")
    assert any(name.endswith("lm_head.weight") for name in load_file(directory / SINGLE))
    assert not read_spec(directory).tie_embeddings
    edit_config(directory, {"tie_word_embeddings": True})
    assert read_spec(directory).untied


@pytest.mark.parametrize("kind", TEXT_MODELS)
def test_what_a_text_config_leaves_out_is_transformers_default(kind: str, tmp_path: Path) -> None:
    from transformers import CONFIG_MAPPING

    architecture, sizes = TEXT_MODELS[kind].architecture, TEXT_MODELS[kind].sizes
    known = {"kimi_k2": "deepseek_v3"}.get(kind, kind)  # Kimi K2 names itself so, and transformers does not
    usual = {**sizes, **CONFIG_MAPPING[known]().to_dict()}  # some are fixed in the model's code
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["LlavaForConditionalGeneration"], "text_config": {"model_type": kind}})
    )
    ours = read_spec(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(usual | {"architectures": [architecture]}))
    theirs = read_spec(tmp_path)
    for name in ("hidden", "layers", "norm", "vocab_size"):
        assert getattr(ours, name) == getattr(theirs, name), name


def test_a_text_model_that_is_not_served_is_named(tmp_path: Path) -> None:
    for text, said in (
        ({"model_type": "nothing"}, "has no model_type None: install a newer transformers"),
        (None, "model_type ''"),
    ):
        config = {"architectures": ["LlavaForConditionalGeneration"], "text_config": text}
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(CheckpointError, match=said):
            read_spec(tmp_path)


def test_adapters_and_lists_of_modules_are_read_with_their_prefixes() -> None:
    assert text_name("model.language_model.layers.0.self_attn.q_proj") == "model.layers.0.self_attn.q_proj"
    assert text_name("language_model.model.layers.0.mlp") == "model.layers.0.mlp"
    assert text_name("language_model.lm_head") == text_name("lm_head") == "lm_head"
    assert text_name("model.vision_tower.encoder.layers.0.mlp.fc1.weight") is None
    assert text_name("multi_modal_projector.mm_input_projection_weight") is None
    for own in ("model.layers.0.mlp.gate_proj.weight", "transformer.h.0.attn.bias", "embed_tokens.weight"):
        assert text_name(own) == own
