"""Settings by flat names, and what of the environment processes inherit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from quire.errors import ConfigError
from quire.foundation.config import Config, environment


def test_changes_make_the_same_settings() -> None:
    assert Config().changes() == {}
    config = Config().with_values(model="m", max_num_seqs=3, port=1, dtype="float32")
    assert config.changes() == {"model": "m", "max_num_seqs": 3, "port": 1, "dtype": "float32"}
    assert Config().with_values(**config.changes()) == config


@pytest.mark.parametrize("before", [None, "/somewhere"])
def test_kernels_are_cached_elsewhere_for_a_while(
    before: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if before is None:
        monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    else:
        monkeypatch.setenv("TRITON_CACHE_DIR", before)
    with environment.kernels_cached_in(tmp_path):
        assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path)
    assert os.environ.get("TRITON_CACHE_DIR") == before


def test_triton_keeps_kernels_where_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    knobs = pytest.importorskip("triton").knobs
    for name in ("TRITON_CACHE_DIR", "TRITON_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert environment.kernel_cache() == Path(knobs.cache.dir)
    monkeypatch.setenv("TRITON_HOME", str(tmp_path))
    assert environment.kernel_cache() == Path(knobs.cache.dir)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "kernels"))
    assert environment.kernel_cache() == Path(knobs.cache.dir) == tmp_path / "kernels"
    assert environment.kernel_settings()["TRITON_HOME"] == str(tmp_path)


def test_nobody_needs_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container under a user that it does not know."""
    for name in ("TRITON_CACHE_DIR", "TRITON_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 5)
    assert environment.kernel_cache().parts[-2:] == (".triton", "cache")


def test_api_processes_are_some_and_only_where_requests_are_served() -> None:
    assert Config().server.api_server_count == 1
    assert Config().with_values(api_server_count=2).server.keeps_model, "models are not swapped then"
    for values in ({"api_server_count": 0}, {"api_server_count": 2, "headless": True}):
        with pytest.raises(ConfigError, match="api-server-count"):
            Config().with_values(**values)
