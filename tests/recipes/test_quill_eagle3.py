"""The recipe of the EAGLE-3 head: a step of training sees what a draft would see, and the files are those of published
heads.
"""

import itertools
import json
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
import torch
from quill.chat import render
from quill.checkpoint import load_model, save_head, save_model
from quill.corpus import Batch, batches, conversation
from quill.eagle3 import Head, HeadShape, frequent_tokens, loss_of, taught
from quill.eagle3_training import agreement, train_head
from quill.model import Llama, Shape
from quill.tokenizer import train_tokenizer
from quill.training_loop import Rates
from safetensors.torch import load_file
from tokenizers import Tokenizer

TINY = Shape(
    hidden_size=32, intermediate_size=48, num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=2, head_dim=8
)
HEAD = HeadShape(TINY, draft_vocab_size=100, sources=(1, 2, 4))
TRAIN = Path(__file__).parents[2] / "recipes" / "quill" / "train_eagle3.py"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    rng = Random(0)
    return train_tokenizer(render(conversation(rng)) for _ in range(300))


@pytest.fixture(scope="module")
def batch(tokenizer: Tokenizer) -> Batch:
    whole = next(batches(tokenizer, rows=2, seed=1, workers=0, device=torch.device("cpu")))
    return Batch(whole.tokens[:, :96], whole.targets[:, :96], whole.documents[:, :96])


@pytest.fixture
def model() -> Llama:
    torch.manual_seed(0)
    model = Llama(TINY).requires_grad_(False)
    model.model.embed_tokens.weight.data.mul_(20)  # so that it prefers something
    return model


def _head(batch: Batch) -> Head:
    torch.manual_seed(1)
    return Head(HEAD, frequent_tokens([batch], 4096, 100))


def test_a_step_of_the_test_sees_what_a_draft_sees(model: Llama, batch: Batch) -> None:
    """Drafting from position 20 by hand: the context up to there by the model, then the head's own states."""
    tokens = batch.tokens[:1, :40]
    one = Batch(tokens, tokens, torch.zeros_like(tokens))
    head = _head(batch)
    with torch.no_grad():
        features = taught(model, head, one).features
        steps = head.unrolled(model, one, features, 3)
        at = 20
        x = head.fc(features[:, : at + 1])
        for k in range(3):
            length = x.shape[1]
            mask = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
            embedded = model.model.embed_tokens(tokens[:, 1 : length + 1])
            out = head.midlayer(embedded, x, (model.cos[:length], model.sin[:length]), mask, [])
            torch.testing.assert_close(head.norm(out)[:, -1], steps[k][:, at], atol=1e-5, rtol=1e-4)
            x = torch.cat((x, out[:, -1:]), dim=1)


def test_the_loss_goes_down(model: Llama, batch: Batch) -> None:
    head = _head(batch)
    head.start_from(model)
    with torch.no_grad():
        before, _ = loss_of(head, model, batch, taught(model, head, batch))
    trained = train_head(head, model, itertools.repeat(batch), 60.0, Rates(matrices=0.05), max_steps=40)
    assert trained.steps == 40
    assert trained.loss < 0.9 * before.item()
    rates = agreement(head, model, itertools.repeat(batch), 1, 3)
    assert rates == sorted(rates, reverse=True)


def test_a_model_is_read_as_it_was_written(model: Llama, tokenizer: Tokenizer, batch: Batch, tmp_path: Path) -> None:
    save_model(model, tokenizer, tmp_path)
    read, again = load_model(tmp_path)
    assert again.to_str() == tokenizer.to_str()
    for name, parameter in model.state_dict().items():
        torch.testing.assert_close(read.state_dict()[name], parameter.bfloat16().float(), atol=0, rtol=0)


def test_the_files_are_those_of_published_heads(batch: Batch, tmp_path: Path) -> None:
    head = _head(batch)
    save_head(head, tmp_path)
    tensors = load_file(next(tmp_path.glob("*.safetensors")))
    layer = "midlayer."
    assert tensors["fc.weight"].shape == (32, 96)
    assert tensors[f"{layer}self_attn.q_proj.weight"].shape == (32, 64)
    assert tensors[f"{layer}self_attn.v_proj.weight"].shape == (16, 64)
    assert tensors["lm_head.weight"].shape == (100, 32)
    proposed = torch.arange(100) + tensors["d2t"]
    assert torch.equal(proposed, tensors["t2d"].nonzero()[:, 0])
    assert torch.equal(proposed, head.tokens)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 4]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 3]


@pytest.mark.long("engine")
def test_the_command(tmp_path: Path) -> None:
    command = [sys.executable, str(TRAIN), "--output", str(tmp_path), "--steps", "1", "--rows", "1", "--workers", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    files = {file.name: file.stat().st_size for file in (tmp_path / "quill_eagle3").iterdir()}
    assert {"config.json", "README.md", "model.safetensors.index.json"} <= set(files)
    assert sum(files.values()) < 5_000_000
