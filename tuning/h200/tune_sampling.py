"""The best SampleConfig: each of its sizes varied on its own, in graphs, over logits that outgrow the GPU's cache.

    python tuning/h200/tune_sampling.py [--vocab 128256] [--json FILE]

Prints microseconds of the op by case: with the config in use, and with the dozen best variants. The best goes to
`SampleConfig` in quire/compute/kernels/triton/sampling/sample.py; sizes on which the token depends where rounding
decides must not depend on the number of reads.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from sweep import compile_all, copies, graph_seconds

from quire.compute.kernels.reference.sample import SamplingColumns
from quire.compute.kernels.triton.sampling.logit_keys import VocabTiling
from quire.compute.kernels.triton.sampling.sample import SampleConfig, sample

READS = (1, 32, 256)
WISHES = {
    "greedy": {"temperature": 0.0},
    "t 1": {},
    "t .8, k 50, p .95": {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
    "t .6, p .9": {"temperature": 0.6, "top_p": 0.9},
    "min_p .05": {"min_p": 0.05},
    "flat, p .95": {"temperature": 20.0, "top_p": 0.95},
}
DEFAULTS = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def variants(vocab: int) -> dict[str, SampleConfig]:
    """By name."""
    usual = SampleConfig(VocabTiling.of(vocab))
    found = {"usual": usual}
    for chunk in (2_048, 4_096, 8_192):
        for warps in (2, 4, 8):
            shape = VocabTiling.of(vocab, chunk=chunk)
            found[f"chunk {chunk}, scan {warps}w"] = replace(usual, shape=shape, scan_warps=warps)
    found["1024 groups"] = replace(usual, shape=VocabTiling.of(vocab, max_groups=1_024), second=700)
    found |= {f"pick {warps}w": replace(usual, pick_warps=warps) for warps in (2, 8)}
    found |= {f"tile {tile}": replace(usual, tile=tile) for tile in (1_024, 4_096)}
    found |= {f"tile {tile}, pick 8w": replace(usual, tile=tile, pick_warps=8) for tile in (4_096,)}
    found |= {f"first {first}": replace(usual, first=first) for first in (64, 256, 512)}
    found["room 1024, second 512"] = replace(usual, room=1_024, second=512)
    for block in (4_096, 8_192, 16_384):
        for warps in (8, 16, 32):
            found[f"block {block}, search {warps}w"] = replace(usual, block=block, search_warps=warps)
    return found


def call_of(reads: int, vocab: int, wishes: dict[str, float], config: SampleConfig) -> Callable[[], None]:
    """A draw on logits of its own."""
    tail = torch.randn(reads, vocab, device="cuda").mul_(2)
    logits = tail.add_(torch.empty_like(tail).exponential_(1 / 1.5)).bfloat16()
    whole = {"top_k"}
    columns = [
        torch.full((reads,), value, dtype=torch.int64 if name in whole else torch.float32, device="cuda")
        for name, value in (DEFAULTS | wishes).items()
    ]
    seed, drawn = torch.randint(0, 2**40, (2, reads), device="cuda").unbind()
    tokens = torch.empty(reads, dtype=torch.int64, device="cuda")
    faults, last = torch.empty(reads, dtype=torch.int8, device="cuda"), torch.zeros_like(tokens)
    asked, slots = SamplingColumns(*columns, seed, drawn), torch.arange(reads, device="cuda")
    return lambda: sample(logits, slots, asked, tokens, faults, last, None, config)


def compile_one(job: tuple[int, SampleConfig]) -> None:
    vocab, config = job
    call_of(1, vocab, {}, config)()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab", type=int, default=128_256)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--processes", type=int, default=8)
    options = parser.parse_args()
    candidates = variants(options.vocab)
    failed = compile_all(compile_one, [(options.vocab, config) for config in candidates.values()], options.processes)
    for (_, config), text in failed.items():
        print(f"failed: {config}: {text}")
    candidates = {name: config for name, config in candidates.items() if (options.vocab, config) not in failed}
    figures: dict[str, dict[str, float]] = {}
    for wish, wishes in WISHES.items():
        for reads in READS:
            times = {name: _microseconds(reads, options.vocab, wishes, config) for name, config in candidates.items()}
            figures[f"{reads} reads, {wish}"] = times
            best = min(times, key=lambda name: times[name])
            print(f"\n{reads} reads, {wish}: usual {times['usual']:.1f} µs, best {times[best]:.1f} µs ({best})")
            print(
                "  " + ", ".join(f"{name} {time:.1f}" for name, time in sorted(times.items(), key=lambda x: x[1])[:12])
            )
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))


def _microseconds(reads: int, vocab: int, wishes: dict[str, float], config: SampleConfig) -> float:
    torch.manual_seed(0)
    calls = [call_of(reads, vocab, wishes, config) for _ in range(min(16, copies(reads * vocab * 2)))]
    for call in calls:
        call()
    return graph_seconds(calls, 4e-5) * 1e6


if __name__ == "__main__":
    main()
