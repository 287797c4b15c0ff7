"""The training code: the model is Hugging Face's Llama, attention stays within documents, and the loss goes down."""

import itertools
from pathlib import Path
from random import Random

import pytest
import torch
from quill.chat import render
from quill.checkpoint import save_model
from quill.corpus import IGNORED, Batch, batches, conversation
from quill.model import Llama, Shape, document_mask
from quill.muon import Muon, orthogonal
from quill.tokenizer import train_tokenizer
from quill.training import loss_of, train
from quill.training_loop import Rates
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

TINY = Shape(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    rng = Random(0)
    return train_tokenizer(render(conversation(rng)) for _ in range(300))


def test_a_saved_model_is_what_transformers_computes(tokenizer: Tokenizer, tmp_path: Path) -> None:
    torch.manual_seed(0)
    ours = Llama(TINY).bfloat16().float()
    save_model(ours, tokenizer, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = torch.randint(0, 4096, (2, 40))
    mask = document_mask(torch.zeros_like(tokens))
    with torch.no_grad():
        expected = theirs(tokens).logits
        torch.testing.assert_close(ours.logits(ours(tokens, mask)), expected, atol=1e-4, rtol=1e-4)
    assert ours.parameter_count == sum(p.numel() for p in theirs.parameters())


def test_attention_stays_within_documents() -> None:
    torch.manual_seed(0)
    model = Llama(TINY)
    tokens = torch.randint(0, 4096, (1, 24))
    documents = torch.tensor([[0] * 10 + [1] * 14])
    with torch.no_grad():
        packed = model(tokens, document_mask(documents))
        alone = model(tokens[:, :10], document_mask(documents[:, :10]))
        torch.testing.assert_close(packed[:, :10], alone)
        tokens[:, :10] = 7
        torch.testing.assert_close(model(tokens, document_mask(documents))[:, 10:], packed[:, 10:])


@pytest.mark.parametrize("shape", [(3, 16, 16), (2, 8, 24), (2, 24, 8)])
def test_orthogonal_matrices_have_singular_values_near_one(shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    singular = torch.linalg.svdvals(orthogonal(torch.randn(shape)).float())
    assert singular.min() > 0.5
    assert singular.max() < 1.5


def test_muon_moves_against_the_gradient() -> None:
    torch.manual_seed(0)
    matrix = torch.nn.Parameter(torch.randn(8, 8))
    muon = Muon([matrix], decay=0.0)
    for _ in range(60):
        loss = matrix.square().sum()
        matrix.grad = None
        loss.backward()
        muon.step(0.1)
    assert matrix.square().sum() < 4


@pytest.fixture(scope="module")
def batch(tokenizer: Tokenizer) -> Batch:
    whole = next(batches(tokenizer, rows=1, seed=1, workers=0, device=torch.device("cpu")))
    return Batch(whole.tokens[:, :96], whole.targets[:, :96], whole.documents[:, :96])


def test_the_loss_goes_down(batch: Batch) -> None:
    torch.manual_seed(0)
    trained = train(Llama(TINY), itertools.repeat(batch), 2.0, Rates(matrices=0.1))
    assert trained.steps > 5
    assert trained.loss < 8.0  # a uniform guess over 4,096 tokens costs 8.3


def test_the_loss_is_that_of_the_answers(batch: Batch) -> None:
    torch.manual_seed(0)
    model = Llama(TINY)
    with torch.no_grad():
        logits = model.logits(model(batch.tokens, document_mask(batch.documents)))
        expected = torch.nn.functional.cross_entropy(logits.transpose(1, 2), batch.targets, ignore_index=IGNORED)
        torch.testing.assert_close(loss_of(model, batch), expected)


def test_a_student_that_agrees_has_no_loss(batch: Batch) -> None:
    torch.manual_seed(0)
    teacher, student = Llama(TINY), Llama(TINY)
    teacher.model.embed_tokens.weight.data.mul_(20)
    with torch.no_grad():
        assert loss_of(teacher, batch, teacher=teacher).item() == pytest.approx(0, abs=1e-5)
        assert loss_of(student, batch, teacher=teacher) > 0.1


def test_rates_rise_then_fall_to_zero() -> None:
    rates = Rates(decay_from=0.5)
    assert rates.scale(0, 0.0) < 0.05
    assert rates.scale(1000, 0.4) == 1.0
    assert rates.scale(1000, 0.75) == pytest.approx(0.5)
    assert rates.scale(1000, 1.0) == 0.0
