"""Cases of draws, penalties and log probabilities, on logits like a model's: a long tail and a few far above it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from quire.compute.kernels.reference.sample import SamplingColumns
from quire.tools.bench.kernel_cases import Arguments, KernelCase

_VOCAB = 128_256
_WISHES: Mapping[str, Mapping[str, float]] = {
    "greedy": {"temperature": 0.0},
    "t 1": {},
    "t .8, k 50, p .95": {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
    "t .6, p .9": {"temperature": 0.6, "top_p": 0.9},
    "min_p .05": {"min_p": 0.05},
    "flat, p .95": {"temperature": 20.0, "top_p": 0.95},
}
_DEFAULTS = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def _sample(reads: int, vocab: int, name: str, dtype: torch.dtype = torch.bfloat16) -> KernelCase:
    wishes = _DEFAULTS | dict(_WISHES[name])

    def make(device: torch.device) -> Arguments:
        columns = {
            key: torch.full((reads,), value, dtype=torch.int64 if key == "top_k" else torch.float32, device=device)
            for key, value in wishes.items()
        }
        seed, drawn = torch.randint(0, 2**40, (2, reads), device=device).unbind()
        tokens = torch.empty(reads, dtype=torch.int64, device=device)
        faults = torch.empty(reads, dtype=torch.int8, device=device)
        slots = torch.randperm(reads, device=device)
        last = torch.zeros_like(tokens)
        asked = SamplingColumns(**columns, seed=seed, drawn=drawn)
        return (_logits(device, reads, vocab, dtype), slots, asked, tokens, faults, last), {}

    suffix = ", fp32" if dtype == torch.float32 else ""
    return KernelCase("sample", f"{reads} × {vocab}, {name}{suffix}", make, reads * vocab * dtype.itemsize)


def _token_logprobs(reads: int, vocab: int, most: int) -> KernelCase:
    def make(device: torch.device) -> Arguments:
        rows, tokens = torch.randperm(reads, device=device), torch.randint(0, vocab, (reads,), device=device)
        return (_logits(device, reads, vocab, torch.bfloat16), rows, tokens, most), {"normalise": True}

    return KernelCase("token_logprobs", f"{reads} × {vocab}, {most} likeliest", make, reads * vocab * 2)


def _apply_penalties(reads: int, vocab: int) -> KernelCase:
    def make(device: torch.device) -> Arguments:
        seen = torch.zeros((reads, vocab), dtype=torch.int32, device=device)
        seen.scatter_(1, torch.randint(0, vocab, (reads, 1_000), device=device), 2)
        weights = torch.rand((reads, 3), device=device) + 0.1
        order = torch.randperm(reads, device=device)
        return (_logits(device, reads, vocab, torch.float32), order, order, seen, weights), {}

    return KernelCase(
        "apply_penalties", f"{reads} × {vocab}, 1000 seen", make, reads * (vocab * 4 + min(vocab, 1_000) * 8)
    )


def _count_sampled(reads: int, vocab: int) -> KernelCase:
    def make(device: torch.device) -> Arguments:
        seen = torch.zeros((reads, vocab), dtype=torch.int32, device=device)
        order = torch.randperm(reads, device=device)
        return (torch.randint(0, vocab, (reads,), device=device), order, order, seen), {}

    return KernelCase("count_sampled", f"{reads} × {vocab}", make, reads * 32)


def _apply_token_bitmask(reads: int, vocab: int) -> KernelCase:
    def make(device: torch.device) -> Arguments:
        order = torch.randperm(reads, device=device)
        bits = torch.randint(-(2**31), 2**31, (reads, -(-vocab // 32)), dtype=torch.int32, device=device)
        return (_logits(device, reads, vocab, torch.bfloat16), order, bits), {}

    return KernelCase("apply_token_bitmask", f"{reads} × {vocab}, half", make, reads * (vocab // 8 + vocab))


def _logits(device: torch.device, reads: int, vocab: int, dtype: torch.dtype) -> Tensor:
    tail = torch.randn(reads, vocab, device=device).mul_(2)
    return tail.add_(torch.empty_like(tail).exponential_(1 / 1.5)).to(dtype)


def _cases(reads: Sequence[int], vocab: int) -> tuple[KernelCase, ...]:
    most = max(reads)
    return (
        *(_sample(n, vocab, name) for name in _WISHES for n in reads),
        *(_sample(most, vocab, name, torch.float32) for name in ("greedy", "t .8, k 50, p .95")),
        *(_token_logprobs(n, vocab, k) for n in reads for k in (0, 5, 20)),
        *(_apply_penalties(n, vocab) for n in reads),
        _count_sampled(most, vocab),
        *(_apply_token_bitmask(n, vocab) for n in reads),
    )


CASES = _cases((1, 32, 256), _VOCAB)
SMALL_CASES = _cases((3,), 500)
