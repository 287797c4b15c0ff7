"""Conversations of many turns: prompts share what is cached, and are answered as if nothing were.

`python -m tests.equivalence.conversation_engines` holds more of them, with more models; `python -m
tests.equivalence.tier_scripts` holds those with faults.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from quire.runtime.worker.kv_transfer import CpuBlockTransfer
from tests.equivalence.conversation_engines import held
from tests.equivalence.conversations import Hits, counted_hits
from tests.equivalence.tier_scripts import FAULTS, tier_scripts
from tests.equivalence.tier_scripts import KINDS as FAULTY

SCRIPTS = {
    "lfm2, roomy": 8, "lfm2, swapped": 8, "qwen3 next, recomputed": 6, "lfm2, drafts, swapped": 12,
    "granite 4, drafts, recomputed": 4, "deepseek v3, drafts": 6, "gemma 4, drafts": 6,
}  # fmt: skip
TIERED = {"deepseek v3, drafts, host tier": 4, "lfm2, host tier": 8}


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
def test_blocks_that_were_on_the_host_or_on_a_disk_that_fails_change_no_token(tmp_path: Path) -> None:
    """Engines are killed and restarted, bits of the file are flipped, it is cut off, writes fail or are torn."""
    counts = Counter[str]()
    for number, kind in enumerate(FAULTY):
        with tier_scripts(tmp_path, kind) as scripts:
            for seed in range(number, 52, len(FAULTY)):
                scripts.run(seed)
        counts += scripts.counts
    assert all(counts[name] for name in ("stored", "loaded", "from disk", "unread", "unwritten")), counts
    assert all(counts[name] for name in FAULTS), counts
