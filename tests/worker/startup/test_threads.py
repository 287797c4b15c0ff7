"""How many threads compute."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.errors import ConfigError
from quire.worker.startup import threads
from quire.worker.startup.threads import compute_threads, cpu_quota, usable_cores


def test_what_is_asked_for_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "usable_cores", lambda: 6)
    assert compute_threads(7, 2) == 7
    assert compute_threads(None, 8) == 6
    assert compute_threads(None, 4) == 4, "as OMP_NUM_THREADS says"
    with pytest.raises(ConfigError, match="--cpu-threads must be at least 1"):
        compute_threads(0, 2)


def test_affinity_and_quota_bound_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr(threads, "_TOPOLOGY", str(tmp_path / "{}"))
    for processor, siblings in enumerate(("0,2", "1,3", "0,2", "1,3")):
        (tmp_path / str(processor)).write_text(siblings)
    quota = tmp_path / "cpu.max"
    monkeypatch.setattr(threads, "_QUOTA", quota)
    assert usable_cores() == 2, "two threads of a core share it"
    quota.write_text("max 100000")
    assert usable_cores() == 2
    quota.write_text("150000 100000")
    assert cpu_quota() == 2
    quota.write_text("50000 100000")
    assert usable_cores() == 1
