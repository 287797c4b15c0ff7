"""Heads and embeddings that config.json ties, or leaves apart, as transformers reads the same files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.models.spec import read_spec
from quire.models.weights.safetensors_files import SINGLE
from tests.checkpoints import edit_config, make_llama, make_tiny
from tests.models.forward import logits_of

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def edit_weights(directory: Path, add: dict[str, Tensor], drop: tuple[str, ...] = ()) -> None:
    tensors = {name: tensor for name, tensor in load_file(directory / SINGLE).items() if name not in drop}
    save_file({name: tensor.clone() for name, tensor in (tensors | add).items()}, directory / SINGLE, {"format": "pt"})


def assert_logits_equal_transformers(directory: Path) -> None:
    from transformers import AutoModelForCausalLM

    tokens = torch.randint(3, 320, (20,), generator=torch.Generator().manual_seed(4))
    with torch.inference_mode():
        ours = logits_of(directory, tokens, torch.float32)
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        theirs = model(tokens.unsqueeze(0)).logits[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma", "gpt2"])
def test_a_tied_model_with_a_head_of_its_own_computes_with_it(family: str, tmp_path: Path) -> None:
    architecture = {"gemma": "Gemma3ForCausalLM", "gpt2": "GPT2LMHeadModel"}.get(family)
    directory = make_tiny(tmp_path, architecture) if architecture else make_llama(tmp_path, tie=True, tokenizer=False)
    tied = read_spec(directory)
    assert tied.tie_embeddings
    edit_weights(directory, {HEAD: torch.randn(320, tied.hidden)})
    spec = read_spec(directory)
    assert (spec.untied, spec.tie_embeddings) == (True, False)
    assert spec.num_parameters == tied.num_parameters + 320 * tied.hidden
    assert_logits_equal_transformers(directory)


def test_a_single_row_makes_the_difference(tmp_path: Path) -> None:
    directory = make_llama(tmp_path, tie=True, tokenizer=False, dtype="bfloat16")
    head = load_file(directory / SINGLE)[EMBEDDING].clone()
    head[-1, -1] += 1
    edit_weights(directory, {HEAD: head})
    assert not read_spec(directory).tie_embeddings


def test_a_second_copy_of_the_embedding_is_left_out(tmp_path: Path) -> None:
    directory = make_llama(tmp_path, tie=True, tokenizer=False)
    edit_weights(directory, {HEAD: load_file(directory / SINGLE)[EMBEDDING]})
    assert (read_spec(directory).untied, read_spec(directory).tie_embeddings) == (False, True)
    assert_logits_equal_transformers(directory)


def test_the_copies_may_lie_in_different_files(tmp_path: Path) -> None:
    directory = make_llama(tmp_path, tie=True, tokenizer=False, shards="40KB")
    save_file({HEAD: torch.randn(320, 64)}, directory / "model-head.safetensors")
    index = directory / "model.safetensors.index.json"
    index.write_text(
        index.read_text().replace('"weight_map": {', f'"weight_map": {{"{HEAD}": "model-head.safetensors",')
    )
    assert read_spec(directory).untied
    assert_logits_equal_transformers(directory)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_tied_model_may_be_stored_with_its_head_alone(family: str, tmp_path: Path) -> None:
    if family == "gpt2":
        directory, embedding = make_tiny(tmp_path, "GPT2LMHeadModel"), "transformer.wte.weight"
    else:
        directory, embedding = make_llama(tmp_path, tie=True, tokenizer=False), EMBEDDING
    edit_weights(directory, {HEAD: load_file(directory / SINGLE)[embedding]}, drop=(embedding,))
    assert read_spec(directory).tie_embeddings
    assert_logits_equal_transformers(directory)


def test_an_untied_model_has_both(tmp_path: Path) -> None:
    directory = make_llama(tmp_path, tokenizer=False)
    edit_config(directory, {"tie_word_embeddings": False})
    assert (read_spec(directory).untied, read_spec(directory).tie_embeddings) == (False, False)


def test_a_head_without_a_word_about_it(tmp_path: Path) -> None:
    directory = make_llama(tmp_path, tokenizer=False)
    edit_config(directory, lambda config: config.pop("tie_word_embeddings"))
    assert_logits_equal_transformers(directory)
