"""Scores of tokens on the device against the reference, and the reference against log_softmax."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.compute.kernels.reference.logprobs import TokenScores, token_logprobs
from quire.compute.kernels.triton.sampling.logit_keys import VocabTiling
from quire.compute.kernels.triton.sampling.logprobs import MOST
from quire.compute.kernels.triton.sampling.logprobs import token_logprobs as on_device

DTYPES = [torch.float32, torch.bfloat16]
SIZES = [(1, 1, 1), (3, 17, 5), (2, 127, 0), (3, 2_003, 20), (1, 90, 90)]
"""Rows, vocabulary, and how many of the likeliest."""
IN_FP16 = (torch.float16, 3, 700, 20)


def assert_close(found: TokenScores, expected: TokenScores) -> None:
    for name in ("ranks", "ids", "best"):
        assert torch.equal(getattr(found, name).cpu(), getattr(expected, name)), name
    for name in ("own", "values", "log_sum"):
        torch.testing.assert_close(getattr(found, name).cpu(), getattr(expected, name), rtol=1e-6, atol=3e-6)


def case(rows: int, vocab: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Logits with many equals, rows of them in any order, and tokens."""
    torch.manual_seed(vocab)
    logits = (torch.randn(rows + 2, vocab + 3) * 5).to(dtype)
    if dtype == torch.bfloat16:
        logits = (logits / 2).round() * 2
    logits[:, vocab:] = 1e4
    return logits[:, :vocab], torch.randperm(rows + 2)[:rows], torch.randint(0, vocab, (rows,))


@pytest.mark.parametrize(
    ("dtype", "rows", "vocab", "k"), [*((dtype, *size) for dtype in DTYPES for size in SIZES), IN_FP16]
)
def test_scores_ranks_and_the_likeliest(rows: int, vocab: int, k: int, dtype: torch.dtype, device: str) -> None:
    logits, reads, tokens = case(rows, vocab, dtype)
    for normalise in (True, False):
        expected = token_logprobs(logits, reads, tokens, k, normalise=normalise)
        inputs = (logits.to(device), reads.to(device), tokens.to(device))
        found = on_device(*inputs, k, shape=VocabTiling.of(vocab, 64, 512), normalise=normalise)
        if k > MOST:  # torch has the order of equals as it likes
            found = found._replace(ids=found.ids.sort(-1).values)
            expected = expected._replace(ids=expected.ids.sort(-1).values)
        assert_close(found, expected)


def test_cut_logits_are_scored(device: str) -> None:
    """As `processed_logprobs` has them: most at -inf, also whole chunks, and more are asked for than are left."""
    logits = torch.full((2, 700), -torch.inf)
    logits[0, [3, 650]], logits[1, 9] = torch.tensor([2.0, 3.0]), -7.0
    reads, tokens = torch.arange(2), torch.tensor([3, 9])
    expected = token_logprobs(logits, reads, tokens, 5, normalise=True)
    assert expected.ids[0].tolist() == [650, 3, 0, 1, 2]
    shape = VocabTiling.of(700, 16, 128)
    found = on_device(logits.to(device), reads.to(device), tokens.to(device), 5, shape=shape, normalise=True)
    assert_close(found, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_reference_is_log_softmax(dtype: torch.dtype) -> None:
    logits, reads, tokens = case(6, 300, dtype)
    found = token_logprobs(logits, reads, tokens, 4, normalise=True)
    values = logits[reads].double().log_softmax(-1)
    torch.testing.assert_close(found.own.double(), values.gather(1, tokens.unsqueeze(1)).squeeze(1))
    torch.testing.assert_close(found.values.double(), values.topk(4).values)
    for row, token, rank, ids in zip(values, tokens, found.ranks, found.ids, strict=True):
        order = sorted(range(300), key=lambda t: (-float(row[t]), t))
        assert rank == 1 + sum(float(x) > float(row[token]) for x in row)
        assert ids.tolist() == order[:4]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [32_000, 50_257, 128_256, 262_144])
@pytest.mark.parametrize("k", [0, 1, 20, MOST, MOST + 1])
def test_vocabularies_of_models(vocab: int, dtype: torch.dtype, k: int, device: str) -> None:
    logits, reads, tokens = case(17, vocab, dtype)
    expected = token_logprobs(logits, reads, tokens, k, normalise=True)
    found = on_device(logits.to(device), reads.to(device), tokens.to(device), k, normalise=True)
    if k > MOST:
        found, expected = (scores._replace(ids=scores.ranks) for scores in (found, expected))  # ties fall otherwise
    assert_close(found, expected)
