"""Draws on the device against the definitions and against the reference: every path, ties, faults and thresholds.

Configs are set so that small rows take the paths of large ones; rows as wide as a vocabulary are for a card.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.compute.kernels.reference.philox import uniform
from quire.compute.kernels.reference.sample import ALL_TIES, SamplingColumns, SamplingThresholds, apply_thresholds
from quire.compute.kernels.reference.sample import sample as reference
from quire.compute.kernels.triton.sampling import sample as sample_module
from quire.compute.kernels.triton.sampling.logit_keys import VocabTiling
from quire.compute.kernels.triton.sampling.sample import SampleConfig, sample
from tests.kernels.exact_sampling import columns, truths
from tests.sampling.test_distributions import CASES, LOGITS, expected, surprise

DTYPES = [torch.float32, torch.bfloat16]
NEAR = {"top_k": 20, "top_p": 0.9}
WISHES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.02},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 10**6},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.95},
    {"top_k": 64, "min_p": 0.02},
    {"temperature": 0.5, "top_p": 0.9},
    {"top_p": 1e-9},
    {"temperature": 1.5, "min_p": 0.1},
    {"min_p": 1.0},
    {"min_p": 0.02, "top_p": 0.8},
]
"""What is found among a few logits."""
FLAT: list[dict[str, Any]] = [
    {"temperature": 9.0, "top_p": 0.6},
    {"temperature": 9.0, "top_p": 0.97, "min_p": 0.01},
    {"temperature": 6.0, "min_p": 0.01},
    {"top_k": 600},
    {"temperature": 2.0, "top_k": 600, "top_p": 0.9},
]
"""What the whole row is searched for."""


def small_config(vocab: int) -> SampleConfig:
    """For rows of a thousand."""
    return SampleConfig(VocabTiling.of(vocab, 128, 512), room=256, first=100, second=100, block=256)


def run(
    logits: Tensor,
    asked: SamplingColumns,
    slots: Tensor | None = None,
    *,
    last: Tensor | None = None,
    small: bool = True,
) -> tuple[Tensor, Tensor, SamplingThresholds]:
    """Tokens, faults and thresholds on the host; `small` is the config for rows of a thousand."""
    reads, vocab = logits.shape
    slots = torch.arange(reads, device=logits.device) if slots is None else slots
    tokens = torch.full((reads,), -9, device=logits.device)
    faults = torch.full((reads,), 99, dtype=torch.int8, device=logits.device)
    thresholds = SamplingThresholds(torch.full((reads,), torch.nan, device=logits.device), tokens.clone())
    if small:
        sample(logits, slots, asked, tokens, faults, last, thresholds, small_config(vocab))
    else:
        sample(logits, slots, asked, tokens, faults, last, thresholds)
    return tokens.cpu(), faults.cpu(), SamplingThresholds(thresholds.value.cpu(), thresholds.last_id.cpu())


def logits_like(generator: np.random.Generator, rows: int, vocab: int, dtype: torch.dtype, device: str) -> Tensor:
    """A heavy head and a long tail, as models have them."""
    values = generator.normal(0, 2, (rows, vocab)) + 3 * generator.standard_exponential((rows, vocab))
    return torch.tensor(values).to(dtype).to(device)


def assert_drawn(logits: Tensor, asked: SamplingColumns, slots: Tensor, tokens: Tensor) -> None:
    """Each token is the definition's, or rounding explains it."""
    for read, found in enumerate(truths(logits, slots, asked)):
        assert found.miss(int(tokens[read])) < found.slack, (read, [float(c[slots[read]]) for c in asked])


def assert_kept(logits: Tensor, asked: SamplingColumns, slots: Tensor, thresholds: SamplingThresholds) -> None:
    """The thresholds leave what the filters do by definition, but for rounding."""
    scores = apply_thresholds(logits.cpu(), asked.temperature[slots].cpu(), thresholds)
    for row, found in zip(scores, truths(logits, slots, asked), strict=True):
        assert torch.equal((row > -torch.inf) | found.unsure, found.kept | found.unsure)


def seeded(generator: np.random.Generator, wishes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    seeds, drawn = generator.integers(-(2**63), 2**63, len(wishes)), generator.integers(0, 2**40, len(wishes))
    return [{"seed": int(s), "drawn": int(d)} | w for s, d, w in zip(seeds, drawn, wishes, strict=True)]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("wishes", [WISHES, FLAT], ids=["gathered", "searched"])
def test_every_path_draws_by_the_definition(dtype: torch.dtype, wishes: list[dict[str, Any]], device: str) -> None:
    generator = np.random.default_rng(7)
    logits = logits_like(generator, len(wishes), 2_003, dtype, device)
    asked = columns(device, seeded(generator, wishes))
    slots = torch.arange(len(wishes), device=device)
    tokens, faults, thresholds = run(logits, asked)
    assert faults.tolist() == [0] * len(wishes)
    assert_drawn(logits, asked, slots, tokens)
    again, told = torch.full_like(tokens, -9), torch.full_like(faults, 99)
    reference(logits.cpu(), slots.cpu(), SamplingColumns(*(c.cpu() for c in asked)), again, told)
    assert torch.equal(tokens, again)
    assert_kept(logits, asked, slots, thresholds)


@pytest.mark.parametrize("dtype", DTYPES)
def test_only_flat_rows_are_searched(dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Nothing:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *args, **named: None

    monkeypatch.setattr(sample_module, "top_k_top_p_search", Nothing())
    wishes = WISHES[::3] + FLAT
    logits = logits_like(np.random.default_rng(8), len(wishes), 2_003, dtype, device)
    tokens, _, _ = run(logits, columns(device, wishes))
    assert (tokens < 0).tolist() == [False] * len(WISHES[::3]) + [True] * len(FLAT)


@pytest.mark.parametrize("vocab", [1, 3, 17, 129, 256, 260])
def test_any_width(vocab: int, device: str) -> None:
    generator = np.random.default_rng(vocab)
    wishes = seeded(generator, [{}, {"top_k": 3, "top_p": 0.8}, {"temperature": 0.0}, {"top_p": 0.7}])
    whole = logits_like(generator, len(wishes), vocab + 5, torch.float32, device)
    whole[:, vocab:] = 1e4  # beyond the rows' ends
    asked, slots = columns(device, wishes), torch.arange(len(wishes), device=device)
    tokens, faults, _ = run(whole[:, :vocab], asked)
    assert faults.tolist() == [0] * len(wishes)
    assert_drawn(whole[:, :vocab], asked, slots, tokens)


def test_the_first_of_equals(device: str) -> None:
    logits = torch.full((7, 700), -3.0, device=device)
    logits[0, [5, 9]] = torch.tensor([-0.0, 0.0], device=device)
    logits[1, 300:] = 2.5
    wishes = [{"temperature": 0.0}] * 2 + [{"top_k": 4}, {"top_p": 0.5}, {"top_k": 90, "top_p": 0.5}, {"top_k": 1}, {}]
    logits[2, [600, 7]] = 1.0  # two better ones; of the equals behind them two stay
    tokens, faults, thresholds = run(logits, columns(device, wishes))
    assert faults.tolist() == [0] * 7
    assert tokens[:2].tolist() == [5, 300]
    assert tokens[5] == 0
    assert thresholds.last_id[[2, 3, 4, 5]].tolist() == [1, 349, 44, 0]
    assert thresholds.value[2:6].tolist() == [-3.0] * 4
    assert thresholds.last_id[6] == ALL_TIES


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_first_of_equals_in_rows_that_are_searched(dtype: torch.dtype, device: str) -> None:
    """More equals than are ever gathered, of one value, and of two with nothing between them."""
    logits = torch.full((6, 1_300), 1.0, dtype=dtype)
    logits[2:4, ::2] = torch.nextafter(logits[0, 0], logits[0, 0] + 1)
    logits[4] = -0.0
    logits[5, ::13] = 1.5
    logits = logits.to(device)
    wishes = [{"top_k": 700}, {"top_p": 0.625}, {"top_k": 900}, {"top_p": 0.25}, {"top_k": 700, "top_p": 0.5}]
    wishes.append({"top_k": 900, "top_p": 0.75})
    asked, slots = columns(device, seeded(np.random.default_rng(0), wishes)), torch.arange(6, device=device)
    tokens, _, thresholds = run(logits, asked)
    assert thresholds.last_id[[0, 1, 2, 4]].tolist() == [699, 812, 499, 349]
    assert_drawn(logits, asked, slots, tokens)
    assert_kept(logits, asked, slots, thresholds)


def test_numbers_are_those_of_philox(device: str) -> None:
    """Among 512 equals the token is the number's share of them, for seeds and counters of 64 bits."""
    generator = np.random.default_rng(1)
    wishes = seeded(generator, [{}] * 6)
    asked = columns(device, wishes)
    tokens, _, _ = run(torch.zeros(6, 512, device=device), asked)
    assert tokens.tolist() == (uniform(asked.seed.cpu(), asked.drawn.cpu()) * 512).long().tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_wrong_is_told_and_stays_alone(dtype: torch.dtype, device: str) -> None:
    generator = np.random.default_rng(2)
    clean = logits_like(generator, 7, 300, dtype, device)
    asked = columns(device, seeded(generator, [NEAR, NEAR, {}, {"top_p": 0.5}, {"temperature": 0.0}, NEAR, {}]))
    expected_tokens, _, _ = run(clean, asked)
    logits = clean.clone()
    logits[0, 70], logits[1, 299] = torch.nan, torch.inf
    logits[2, 3] = -torch.tensor(torch.nan)
    logits[3] = -torch.inf
    logits[4, :299] = -torch.inf
    tokens, faults, _ = run(logits, asked)
    assert faults.tolist() == [1, 1, 1, 2, 0, 0, 0]
    assert tokens[4:].tolist() == [299, *expected_tokens[5:].tolist()]
    assert ((tokens >= 0) & (tokens < 300)).all()
    again, told = torch.zeros_like(tokens), torch.zeros_like(faults)
    reference(logits.cpu(), torch.arange(7), SamplingColumns(*(c.cpu() for c in asked)), again, told)
    assert torch.equal(told, faults)


def test_few_finite_logits_are_found_at_once(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As allowed_token_ids leaves them: the rest has no weight and is not searched."""
    monkeypatch.setattr(sample_module, "top_k_top_p_search", None)
    logits = torch.full((3, 900), -torch.inf, device=device)
    logits[:, [3, 500, 899]] = torch.tensor([1.0, 2.0, 1.5], device=device)
    asked = columns(device, seeded(np.random.default_rng(3), [{"top_k": 50}, {"top_p": 0.99}, {"min_p": 0.01}]))
    tokens = torch.full((3,), -9, device=device)
    faults = torch.full((3,), 9, dtype=torch.int8, device=device)
    with pytest.raises(TypeError):  # the launch of the search, behind all that is looked at here
        sample(logits, torch.arange(3, device=device), asked, tokens, faults, None, None, small_config(900))
    assert_drawn(logits, asked, torch.arange(3, device=device), tokens.cpu())


def test_slots_keep_their_token_and_count_it(device: str) -> None:
    generator = np.random.default_rng(4)
    logits = logits_like(generator, 6, 2_003, torch.bfloat16, device)
    wishes = seeded(generator, [NEAR, {"temperature": 0.0}, FLAT[0], {}, {"top_p": 0.7}, {"temperature": 0.0}])
    asked, slots = columns(device, wishes), torch.tensor([3, 0, 2, 5, 5], device=device)
    before = asked.drawn.tolist()
    last = torch.full((6,), -1, device=device)
    tokens, _, _ = run(logits[:5], asked, slots, last=last)
    assert last[[3, 0, 2]].tolist() == tokens[:3].tolist()
    assert last[[1, 4]].tolist() == [-1, -1]
    assert (asked.drawn[[0, 2, 3]].cpu() - torch.tensor(before)[[0, 2, 3]]).tolist() == [1, 1, 1]
    assert asked.drawn[[1, 4]].tolist() == [before[1], before[4]]
    moved, _, _ = run(logits[:1], asked, slots[:1])
    undone = SamplingColumns(*asked[:-1], torch.tensor(before, device=device))
    assert run(logits[:1], undone, slots[:1])[0].tolist() == tokens[:1].tolist()
    assert moved.tolist() == run(logits[:1], asked, slots[:1])[0].tolist()


def test_a_row_draws_the_same_whatever_stands_beside_it(device: str) -> None:
    generator = np.random.default_rng(5)
    wishes = seeded(generator, [WISHES[6], FLAT[0], WISHES[8]])
    logits = logits_like(generator, 3, 2_003, torch.bfloat16, device)
    asked = columns(device, wishes)
    together, _, _ = run(logits, asked)
    for read in range(3):
        alone, _, _ = run(logits[read : read + 1], asked, torch.tensor([read], device=device))
        assert alone.tolist() == together[read : read + 1].tolist()


def counts(device: str, params: dict[str, Any], draws: int, rows: int, seed: int) -> list[float]:
    """How often each token of LOGITS comes."""
    asked = columns(device, [params | {"seed": seed, "drawn": i} for i in range(rows)])
    logits, seen = LOGITS.to(device).repeat(rows, 1), torch.zeros(len(LOGITS))
    tokens, faults = (
        torch.empty(rows, dtype=torch.int64, device=device),
        torch.empty(rows, dtype=torch.int8, device=device),
    )
    for _ in range(0, draws, rows):
        sample(logits, torch.arange(rows, device=device), asked, tokens, faults)
        seen += torch.bincount(tokens.cpu(), minlength=len(LOGITS))
        asked.drawn.add_(rows)
    return [float(x) for x in seen]


def test_a_few_draws_follow_what_was_asked_for(device: str) -> None:
    params = {"temperature": 0.8, "top_k": 6, "top_p": 0.95}
    seen = counts(device, params, 60, 60, seed=5)
    assert surprise(seen, expected(LOGITS.tolist(), params)) < 1
    assert surprise(seen, expected(LOGITS.tolist(), {"temperature": 3.0, "top_k": 6})) > 1


@pytest.mark.gpu
@pytest.mark.parametrize("params", CASES, ids=str)
def test_many_draws_follow_what_was_asked_for(params: dict[str, Any], device: str) -> None:
    seen = counts(device, params, 100_000, 10_000, seed=9)
    assert surprise(seen, expected(LOGITS.tolist(), params)) < 1


WIDE: list[dict[str, Any]] = [
    *WISHES,
    {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
    {"temperature": 0.6, "top_p": 0.9},
    {"top_k": 1_000, "top_p": 0.99},
    {"top_k": 5_000},
    {"temperature": 4.0, "top_p": 0.8},
    {"temperature": 30.0, "top_p": 0.9},
    {"temperature": 2.0, "min_p": 0.001},
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [32_000, 50_257, 128_256, 151_936, 262_144])
def test_vocabularies_of_models(vocab: int, dtype: torch.dtype, device: str) -> None:
    generator = np.random.default_rng(vocab)
    wishes = seeded(generator, WIDE * 2)
    logits = logits_like(generator, len(wishes), vocab, dtype, device)
    asked, slots = columns(device, wishes), torch.arange(len(wishes), device=device)
    tokens, faults, _ = run(logits, asked, small=False)
    assert faults.tolist() == [0] * len(wishes)
    assert_drawn(logits, asked, slots, tokens)


@pytest.mark.gpu
def test_a_draw_can_be_recorded(device: str) -> None:
    generator = np.random.default_rng(6)
    wishes = seeded(generator, WIDE)
    logits = logits_like(generator, len(wishes), 128_256, torch.bfloat16, device)
    asked, slots = columns(device, wishes), torch.arange(len(wishes), device=device)
    tokens, faults = (
        torch.zeros(len(wishes), dtype=torch.int64, device=device),
        torch.zeros(len(wishes), dtype=torch.int8, device=device),
    )
    last = torch.zeros_like(tokens)
    sample(logits, slots, asked, tokens, faults, last)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sample(logits, slots, asked, tokens, faults, last)
    for _ in range(3):
        logits.copy_(logits_like(generator, len(wishes), 128_256, torch.bfloat16, device))
        expected_tokens, _, _ = run(logits, asked, small=False)
        graph.replay()
        assert tokens.tolist() == last.tolist() == expected_tokens.tolist()
