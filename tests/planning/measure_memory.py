"""Run by test_kv_cache_plan: serves a model in this process until its KV cache is full, and says as JSON what that took
and what was planned, with what the C library keeps of freed buffers (MALLOC_MMAP_THRESHOLD_)."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import torch

from quire.engine.inprocess import InProcessClient
from quire.foundation.clock import SystemClock
from quire.foundation.config import Config
from quire.foundation.messages.from_engine import Deltas
from quire.foundation.messages.to_engine import Add
from quire.planning import footprint
from quire.planning.auto_config import ResolvedConfig, resolve
from quire.runtime.executor.cpu_executor import CpuExecutor
from quire.sampling_params import SamplingParams

OUTPUT = 96
"""Tokens that each request generates: they must all be running before the first one ends."""


def status(key: str) -> int:
    """Bytes, from /proc/self/status."""
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


def fill(resolved: ResolvedConfig) -> None:
    """One request for each slot, all of them running until every block is taken."""
    config = resolved.config
    client = InProcessClient(config, CpuExecutor(config, SystemClock()))  # no cost model: prompts take whole steps
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew: reading weights has one of its own
    rows, length = config.scheduler.max_num_seqs, config.model.max_model_len
    assert rows is not None
    assert isinstance(length, int)
    for number in range(1, rows + 1):
        prompt = [(number * 7919 + i * 31) % resolved.spec.vocab_size for i in range(length - OUTPUT)]
        params = SamplingParams(max_tokens=OUTPUT, temperature=1.0 if number % 2 else 0.5, presence_penalty=0.5)
        client.send(Add(number, prompt, len(prompt), params, [], seed=number, arrival=0.0))
    ended, free = 0, config.cache.num_gpu_blocks_override or 0
    while ended < rows:
        message = client.receive(None)
        if isinstance(message, Deltas):
            ended, free = ended + len(message.ends), min(free, message.load.free_blocks)
    client.close()
    assert free <= rows, f"{free} blocks were never written"


def main() -> None:
    settings = json.loads(sys.argv[1])
    footprint.MAPPED_BYTES = int(os.environ.get("MALLOC_MMAP_THRESHOLD_", footprint.MAPPED_BYTES))
    resolved = resolve(Config().with_values(**settings))
    warm = torch.randn(64, 64)  # the threads and what they hold are torch's, not the model's
    assert (warm @ warm).isfinite().all()
    before = status("RssAnon")
    fill(resolved)
    used = status("VmHWM") - status("RssFile") - before
    parts = resolved.memory.footprint
    print(json.dumps({"used": used, "weights": parts.weights, "kv": parts.kv_cache, "step": parts.activations}))


if __name__ == "__main__":
    main()
