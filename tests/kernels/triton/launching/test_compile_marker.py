"""A start that left all its kernels on disk is known to the next one like it, and to no other."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from quire.compute.kernels.triton.launching import compile_marker
from quire.compute.kernels.triton.launching.compile_marker import is_written, marker_path, write


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of all kernels, one."""
    (tmp_path / "kernels" / "attention").mkdir(parents=True)
    (tmp_path / "kernels" / "attention" / "decode.py").write_text("one = 1\n")
    monkeypatch.setattr(compile_marker, "_SOURCES", tmp_path / "kernels")
    return tmp_path / "kernels"


def test_one_like_it_finds_the_trace(tmp_path: Path) -> None:
    marker = marker_path(tmp_path, b"settings")
    assert not is_written(marker)
    write(marker)
    assert is_written(marker_path(tmp_path, b"settings"))


def test_others_do_not(sources: Path, tmp_path: Path) -> None:
    first = marker_path(tmp_path, b"settings")
    assert marker_path(tmp_path, b"other settings") != first
    assert marker_path(sources, b"settings") != first, "another cache"
    os.utime(sources / "attention" / "decode.py", (1, 1))
    changed = marker_path(tmp_path, b"settings")
    (sources / "new.py").touch()
    larger = marker_path(tmp_path, b"settings")
    (sources / "configs").mkdir()
    (sources / "configs" / "device_name=A_GPU,dtype=bf16.json").write_text("{}")
    assert len({first, changed, larger, marker_path(tmp_path, b"settings")}) == 4


def test_what_cannot_be_looked_at_is_not_there(sources: Path, tmp_path: Path) -> None:
    (sources / ".#decode.py").symlink_to("nowhere")  # an editor's
    (tmp_path / "file").touch()
    assert not is_written(marker_path(tmp_path / "file", b"settings"))


def test_without_a_cache_nobody_is_told(tmp_path: Path) -> None:
    write(marker := marker_path(tmp_path / "gone", b"settings"))
    assert not marker.exists()
