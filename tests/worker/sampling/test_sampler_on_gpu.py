"""Transforms, sampling and log probabilities on a GPU: the same as on a CPU, without ever waiting for the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.foundation.messages.workers import TokenLogprobs
from quire.runtime.worker.sampling.logprobs import LogprobsMode
from quire.runtime.worker.sampling.sampled_outputs import errors_of
from quire.runtime.worker.sampling.sampler import Deferred, sample_and_advance, sample_with_transforms, warm_up
from quire.runtime.worker.slot_table import SlotTable
from tests.worker.driver import admitted

pytestmark = pytest.mark.gpu
VOCAB = 5_003
OWNERS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"seed": 1, "temperature": 0.8, "top_k": 50, "top_p": 0.95},
    {"seed": 2, "top_p": 0.9, "logprobs": 3},
    {"seed": 3, "presence_penalty": 1.5, "frequency_penalty": 0.5, "history": [5, 6, 7, 7, 8], "prompt_len": 2},
    {"seed": 4, "repetition_penalty": 1.3, "history": [9, 9, 1], "prompt_len": 1, "top_k": 9},
    {"temperature": 0.0, "allowed_token_ids": [40, 41, 4_900], "logprobs": 20},
    {"seed": 5, "logit_bias": {7: 9.0, 11: -100.0}, "min_p": 0.05, "logprob_token_ids": [7, 11, 12]},
    {"seed": 6, "min_tokens": 2, "stop_ids": [3, 4], "temperature": 9.0},
    {"seed": 7, "bad_words": [[20], [30, 31], [32, 33, 34]], "history": [5, 32, 33], "prompt_len": 1, "logprobs": 0},
    {"temperature": 0.0, "allowed_token_ids": [3], "min_tokens": 9, "stop_ids": [3]},
    {"seed": 8, "temperature": 20.0, "top_p": 0.97},
]


@contextmanager
def no_waiting() -> Iterator[None]:
    """Any call that would wait for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def table(device: str) -> SlotTable:
    """With its owners; what a plan's columns do is done here, since they travel by themselves."""
    slots = SlotTable(len(OWNERS), 1, 1, VOCAB, torch.device(device))
    owners = [admitted(i, **{"seed": 0, "num_sampled": 0} | owner) for i, owner in enumerate(OWNERS)]
    for owner in owners:
        slots.host.admit(owner)
        slots.transforms.admit(owner)
    columns = {
        "temperature": [0.0 if owner.sampling.greedy else owner.sampling.temperature for owner in owners],
        "top_p": [owner.sampling.top_p for owner in owners],
        "min_p": [owner.sampling.min_p for owner in owners],
        "top_k": [owner.sampling.top_k for owner in owners],
        "seed": [owner.seed for owner in owners],
    }
    for name, values in columns.items():
        getattr(slots, name)[: len(owners)] = torch.tensor(values).to(device)
    return slots


def steps(device: str, mode: LogprobsMode) -> Iterator[tuple[list[int], dict[int, str], list[TokenLogprobs | None]]]:
    """Tokens, errors and reports of a few steps."""
    slots, rows = table(device), np.arange(len(OWNERS))
    generator = torch.Generator().manual_seed(8)
    for step in range(4):
        logits = (torch.randn(len(OWNERS), VOCAB, generator=generator) * 3).bfloat16()
        if step == 2:
            logits[1, 9] = torch.nan
        tokens, faults, reported, sampled = launched(slots, logits.to(device), rows, mode)
        if device == "cuda":
            torch.cuda.synchronize()
        yield tokens.tolist(), errors_of(faults.numpy(), sampled.broken, sampled.transformed), reported()


def launched(slots: SlotTable, logits: Tensor, rows: Any, mode: LogprobsMode) -> Any:
    """What a step samples and reports, on its way to the host."""
    with no_waiting() if logits.is_cuda else open_end():
        reports = slots.host.logprobs_request(rows, mode)
        assert reports is not None
        sampled = sample_with_transforms(logits, rows, slots, keep_scores=reports.processed)
        reported = reports.launch(logits if sampled.scores is None else sampled.scores, sampled.tokens)
        slots.num_sampled.add_(1)
        tokens, faults = (column.to("cpu", non_blocking=True) for column in (sampled.tokens, sampled.faults))
    return tokens, faults, reported, sampled


@contextmanager
def open_end() -> Iterator[None]:
    yield


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"])
def test_a_gpu_samples_and_reports_what_a_cpu_does(mode: LogprobsMode) -> None:
    for found, expected in zip(steps("cuda", mode), steps("cpu", mode), strict=True):
        assert found[1] == expected[1]
        assert [t for i, t in enumerate(found[0]) if i not in found[1]] == [
            t for i, t in enumerate(expected[0]) if i not in found[1]
        ]
        for row, (one, other) in enumerate(zip(found[2], expected[2], strict=True)):
            if row in found[1]:
                continue
            assert (one is None) == (other is None)
            if one is not None and other is not None:
                assert (one.rank, one.top_ids) == (other.rank, other.top_ids)
                assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
                assert one.top_logprobs == pytest.approx(other.top_logprobs, abs=1e-4)


def test_transforms_are_admitted_without_waiting() -> None:
    slots = SlotTable(len(OWNERS), 1, 1, VOCAB, torch.device("cuda"))
    with no_waiting():
        for i, owner in enumerate(OWNERS):
            slots.transforms.admit(admitted(i, **{"seed": 0, "num_sampled": 0} | owner))


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_what_is_compiled_later_takes_its_memory_now(mode: Any) -> None:
    """The KV cache is sized by the memory of sampling, also of deferred kernels, which do not run yet."""
    from quire.compute.kernels.triton.launching.precompiler import Precompiler

    logits = torch.zeros(64, 50_000, dtype=torch.bfloat16, device="cuda")
    slots = SlotTable(64, 1, 1, 50_000, torch.device("cuda"))
    with Precompiler(1, lambda *_: None, lambda: None) as precompiler:
        contexts: list[Deferred] = [nullcontext, nullcontext, lambda: precompiler.warmup(deferred=True)]
        _, now, later = [_peak(partial(warm_up, logits, slots, mode, deferred)) for deferred in contexts]
    assert now == later > logits.numel() * 4


def _peak(run: Callable[[], None]) -> int:
    """Bytes that were held beyond those held before."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    return torch.cuda.max_memory_allocated() - before


def test_captured_sampling_is_that_of_sample() -> None:
    """Of slots without transforms, padded with rows of the dummy."""
    slots, alone = table("cuda"), table("cuda")
    plain = [0, 1, 2, 10]
    where = torch.tensor([*plain, slots.dummy, slots.dummy], device="cuda")
    logits = torch.zeros(len(where), VOCAB, dtype=torch.bfloat16, device="cuda")
    tokens, faults = torch.zeros_like(where), torch.zeros(len(where), dtype=torch.int8, device="cuda")
    warm_up(logits, slots, "raw_logprobs")
    sample_and_advance(logits, where, slots, tokens, faults)
    slots.num_sampled.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sample_and_advance(logits, where, slots, tokens, faults)
    for step in range(4):
        logits.copy_(torch.randn(len(where), VOCAB) * 3)
        graph.replay()
        expected = sample_with_transforms(logits[: len(plain)], np.array(plain), alone)
        assert tokens[: len(plain)].tolist() == expected.tokens.tolist()
        assert slots.last_token[plain].tolist() == expected.tokens.tolist()
        assert slots.num_sampled[plain].tolist() == [step + 1] * len(plain)
        alone.num_sampled.add_(1)
