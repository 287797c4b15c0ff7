"""How many threads compute."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from quire.errors import ConfigError
from quire.runtime.worker.startup import threads
from quire.runtime.worker.startup.threads import compute_threads, cpu_quota, usable_cores


def test_what_is_asked_for_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "usable_cores", lambda: 6)
    assert compute_threads(7, 2) == 7
    assert compute_threads(None, 8) == 6
    assert compute_threads(None, 4) == 4, "as OMP_NUM_THREADS says"
    assert [compute_threads(None, 8, ranks) for ranks in (2, 4, 8)] == [3, 1, 1], "ranks share cores"
    with pytest.raises(ConfigError, match="--cpu-threads must be at least 1"):
        compute_threads(0, 2)


@pytest.fixture
def cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file system of cgroups, on a machine with two cores of two threads each."""
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr(threads, "_TOPOLOGY", str(tmp_path / "{}"))
    for processor, siblings in enumerate(("0,2", "1,3", "0,2", "1,3")):
        (tmp_path / str(processor)).write_text(siblings)
    monkeypatch.setattr(threads, "_CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(threads, "_MEMBERSHIP", tmp_path / "membership")
    (tmp_path / "cgroup").mkdir()
    return tmp_path / "cgroup"


def test_two_threads_of_a_core_share_it(cgroups: Path) -> None:
    assert usable_cores() == 2


@pytest.mark.parametrize(
    ("limit", "cores"), [("max 100000", 2), ("150000 100000", 2), ("149000 100000", 1), ("50000 100000", 1)]
)
def test_a_quota_bounds_the_cores(cgroups: Path, limit: str, cores: int) -> None:
    (cgroups / "cpu.max").write_text(limit)
    assert usable_cores() == cores


def test_the_tightest_quota_around_the_process_counts(cgroups: Path) -> None:
    cgroups.with_name("membership").write_text("0::/machine/pod/container\n")
    own = cgroups / "machine" / "pod" / "container"
    own.mkdir(parents=True)
    assert cpu_quota() == math.inf
    (cgroups / "machine" / "cpu.max").write_text("400000 100000")
    assert cpu_quota() == 4
    (own.parent / "cpu.max").write_text("150000 100000")
    (own / "cpu.max").write_text("300000 100000")
    assert cpu_quota() == 1.5
    (cgroups / "machine" / "pod" / "sibling").mkdir()
    (cgroups / "machine" / "pod" / "sibling" / "cpu.max").write_text("10000 100000")
    assert cpu_quota() == 1.5, "another container's is its own affair"


def test_quotas_of_the_older_version_of_cgroups_count_as_well(cgroups: Path) -> None:
    cgroups.with_name("membership").write_text(
        "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n1:name=systemd:/x\n0::/\n"
    )
    own = cgroups / "cpu,cpuacct" / "docker" / "abc"
    own.mkdir(parents=True)
    for directory, quota in ((own, "-1"), (own.parent, "100000")):
        (directory / "cpu.cfs_quota_us").write_text(quota)
        (directory / "cpu.cfs_period_us").write_text("100000")
    assert cpu_quota() == 1
