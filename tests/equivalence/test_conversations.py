"""Conversations of many turns: prompts share what is cached, and are answered as if nothing were.

`python -m tests.equivalence.conversation_engines` holds more of them, with more models.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from quire.foundation.messages.from_engine import DiskLoad
from quire.runtime.worker.kv_transfer import CpuBlockTransfer
from quire.runtime.worker.startup import disk_tier
from quire.scheduling.kvcache.disk_pool import DiskPool
from tests.equivalence.conversation_engines import KINDS, TIER, held
from tests.equivalence.conversations import Hits, counted_hits

SCRIPTS = {
    "lfm2, roomy": 8, "lfm2, swapped": 8, "qwen3 next, recomputed": 6, "lfm2, drafts, swapped": 12,
    "granite 4, drafts, recomputed": 4, "deepseek v3, drafts": 6, "gemma 4, drafts": 6,
}  # fmt: skip
TIERED = {"llama, host tier": 2, "gemma3, host tier": 2, "deepseek v3, drafts, host tier": 4, "lfm2, host tier": 8}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.long("engine")
def test_conversations_are_answered_as_if_nothing_were_cached(tmp_path: Path) -> None:
    total, preemptions = Hits(), 0
    for kind, scripts in SCRIPTS.items():
        with counted_hits() as hits, held(tmp_path, kind) as engines:
            for seed in range(scripts):
                engines.run(seed, rounds=2)
            preemptions += engines.engine.client.counts()["preemptions"]
        total.cached, total.shared = total.cached + hits.cached, total.shared + hits.shared
    assert preemptions > 0
    assert total.shared >= 0.9 * total.cached > 0, total


@pytest.mark.long("engine")
@pytest.mark.parametrize("kind", TIERED)
def test_blocks_that_were_on_the_host_change_no_token(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuBlockTransfer, "measure_load_ms", lambda transfer: 1e-9)  # whatever else the machine does
    with held(tmp_path, kind) as engines:
        for seed in range(TIERED[kind]):
            engines.run(seed, rounds=4)
        tier = engines.engine.client.heartbeat().load.tier
    assert tier is not None
    assert min(tier.stored_bytes, tier.loaded_bytes, tier.hit_tokens) > 0
    assert tier.too_slow == 0


@pytest.mark.long("engine")
def test_blocks_that_were_on_a_disk_that_fails_change_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines begin and end, bits of the file are flipped between, it is cut off, and writes fail."""
    monkeypatch.setattr(CpuBlockTransfer, "measure_load_ms", lambda transfer: 1e-9)
    monkeypatch.setattr(DiskPool, "learn", lambda disk, ms, blocks: None)
    monkeypatch.setattr(disk_tier, "perf_counter", lambda: 0.0)
    rng, pwritev = random.Random(7), os.pwritev

    def write(file: int, pieces: list[memoryview], at: int) -> int:
        return pwritev(file, pieces if rng.random() < 0.7 else pieces[:1], at)

    monkeypatch.setattr(os, "pwritev", write)
    monkeypatch.setitem(
        KINDS,
        "llama, disk",
        ("LlamaForCausalLM", TIER | {"kv_disk_path": str(tmp_path / "disk"), "kv_disk_size": 0.001}),
    )
    file, loads = tmp_path / "disk" / "kv_blocks", list[DiskLoad]()
    for life in range(3):
        with held(tmp_path, "llama, disk") as engines:
            engines.run(life // 2, rounds=3)
            tier = engines.engine.client.heartbeat().load.tier
        assert tier is not None
        assert tier.disk is not None
        loads.append(tier.disk)
        content = bytearray(file.read_bytes())
        for _ in range(3):  # not of the canary, which would empty it
            content[rng.randrange(len(content) // 2, len(content))] ^= 1 << rng.randrange(8)
        file.write_bytes(content[: len(content) - rng.randrange(3_000)])
    assert sum(load.loaded_bytes for load in loads) > 0
    assert sum(load.unread for load in loads) > 0
    assert sum(load.unwritten for load in loads) > 0
