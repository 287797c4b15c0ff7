"""A file of KV blocks: what is read is what was written, or it is refused, whatever has happened to the file."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.errors import ConfigError
from quire.runtime.worker import disk_store
from quire.runtime.worker.disk_store import DiskStore
from quire.runtime.worker.startup.disk_tier import is_near

BYTES = 300
DIGEST, CANARY = bytes(range(32)), b"canary" * 50


def open_store(directory: Path, digest: bytes = DIGEST, canary: bytes = CANARY, size: int = 20_000) -> DiskStore:
    return DiskStore(str(directory / "disk"), BYTES, size, digest, canary)


def begun(store: DiskStore) -> list[tuple[int, tuple[int, bytes]]]:
    return store.begin(store.stored_canary() == store._canary)


def key(number: int) -> tuple[int, bytes]:
    return number % 3, bytes([number]) * 32


def pieces(content: bytes) -> list[memoryview]:
    memory = memoryview(bytearray(content))
    return [memory[:100], memory[100:120], memory[120:]]


def read(store: DiskStore, slot: int, number: int) -> bytes | None:
    memory = pieces(bytes(BYTES))
    return b"".join(memory) if store.read(slot, key(number), memory) else None


def filled(directory: Path, count: int = 8) -> list[bytes]:
    """The contents of a file that was written and closed."""
    store, contents = open_store(directory), [random.Random(number).randbytes(BYTES) for number in range(count)]
    assert begun(store) == []
    assert all(store.write(number, key(number), pieces(each)) for number, each in enumerate(contents))
    store.close()
    return contents


def test_blocks_outlive_the_store(tmp_path: Path) -> None:
    contents = filled(tmp_path)
    store = open_store(tmp_path)
    assert begun(store) == [(number, key(number)) for number in range(8)]
    assert [read(store, number, number) for number in range(8)] == contents
    assert store.write(3, key(9), pieces(contents[0]))
    store.erase(4)
    store.close()
    again = open_store(tmp_path)
    assert begun(again) == [*((number, key(number)) for number in (0, 1, 2, 5, 6, 7)), (3, key(9))]
    again.close()


def test_no_wrong_block_is_read_whichever_byte_is_flipped(tmp_path: Path) -> None:
    contents = filled(tmp_path)
    file, rng = tmp_path / "disk" / "kv_blocks", random.Random(1)
    whole = file.read_bytes()
    for _ in range(200):
        broken = bytearray(whole)
        broken[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        file.write_bytes(broken)
        store = open_store(tmp_path)
        for slot, found in begun(store):
            assert read(store, slot, found[1][0]) in (contents[found[1][0]], None)
        store.close()


def test_no_wrong_block_is_read_wherever_the_file_is_torn(tmp_path: Path) -> None:
    """Cut off, or with pages that never came."""
    contents = filled(tmp_path)
    file, rng = tmp_path / "disk" / "kv_blocks", random.Random(2)
    whole = file.read_bytes()
    for number in range(100):
        torn = bytearray(whole)
        at = rng.randrange(len(whole))
        torn[at : at + (rng.randrange(500) if number % 2 else len(whole))] = bytes(rng.randrange(500) * (number % 2))
        file.write_bytes(torn)
        store = open_store(tmp_path)
        for slot, found in begun(store):
            assert read(store, slot, found[1][0]) in (contents[found[1][0]], None)
        store.close()


def test_another_key_is_not_read(tmp_path: Path) -> None:
    """An index that is stale finds nothing."""
    filled(tmp_path)
    store = open_store(tmp_path)
    begun(store)
    assert read(store, 3, 4) is None
    assert read(store, 30, 4) is None
    store.close()


@pytest.mark.parametrize("change", [{"digest": bytes(32)}, {"canary": b"kanary" * 50}])
def test_a_file_of_other_contents_is_begun_anew(tmp_path: Path, change: dict[str, Any]) -> None:
    filled(tmp_path)
    store = open_store(tmp_path, **change)
    assert begun(store) == []
    assert read(store, 3, 3) is None
    store.close()


def test_a_disk_that_is_full_takes_no_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = filled(tmp_path)
    store = open_store(tmp_path)
    begun(store)

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", full)
        assert not store.write(9, key(9), pieces(contents[0]))
        patch.setattr(os, "pwritev", lambda file, some, at: 10)
        assert not store.write(2, key(9), pieces(contents[0]))
    assert read(store, 1, 1) == contents[1]
    monkeypatch.setattr(os, "preadv", full)
    assert read(store, 1, 1) is None
    store.close()


def test_the_file_is_its_owners_alone_and_bounded(tmp_path: Path) -> None:
    filled(tmp_path)
    assert (tmp_path / "disk").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "disk" / "kv_blocks").stat().st_mode & 0o777 == 0o600
    store = open_store(tmp_path)
    with pytest.raises(ConfigError, match="another server uses"):
        open_store(tmp_path)
    assert disk_store._aligned(store._start) + store.num_slots * store._stride <= 20_000
    store.close()
    (tmp_path / "disk").chmod(0o755)
    with pytest.raises(ConfigError, match="mode 0700"):
        open_store(tmp_path)
    (tmp_path / "disk").chmod(0o700)
    with pytest.raises(ConfigError, match="--kv-disk-size"):
        open_store(tmp_path, size=300)
    with pytest.raises(ConfigError, match="cannot be opened"):
        DiskStore(str(tmp_path / "disk" / "kv_blocks"), BYTES, 20_000, DIGEST, CANARY)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_a_canary_may_differ_by_rounding_alone(dtype: torch.dtype) -> None:
    made = torch.Generator().manual_seed(0)
    here = (100 * torch.randn(4, 2, 64, generator=made)).to(dtype)
    stored = here.view(torch.uint8).numpy().tobytes()
    assert is_near([here], stored)
    rounded = here + (here != 0) * (here / 200 if dtype.is_floating_point else 0)
    assert is_near([rounded.to(dtype)], stored)
    assert not is_near([here.roll(1)], stored)
    assert not is_near([(1.1 * here if dtype.is_floating_point else here // 2).to(dtype)], stored)
