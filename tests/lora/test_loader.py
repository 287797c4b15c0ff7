"""Adapters on their way to the device: in a thread, from the host where possible, and never other contents."""

from __future__ import annotations

import queue
import threading
import time
from pathlib import Path

import pytest
import torch

from quire.foundation.messages.to_engine import Adapter
from quire.foundation.messages.workers import AdapterLoaded, LoadAdapter
from quire.models.lora.files import read_adapter
from quire.models.lora.loader import DeviceAdapterLoader
from quire.models.lora.updates import AdapterMemory, HostAdapter, LowRankUpdates
from tests.lora.adapter_files import Base, small_updates, write


class Loader:
    """A loader, and what it has begun to read. Reads wait for `may_read`."""

    def __init__(self, kept: int = 2) -> None:
        self.may_read = threading.Event()
        self.may_read.set()
        self.updates: LowRankUpdates = small_updates()
        self.memory = AdapterMemory(self.updates, torch.float32, torch.device("cpu"))
        self.read: list[str] = []
        self._said: queue.SimpleQueue[AdapterLoaded] = queue.SimpleQueue()
        self.loader = DeviceAdapterLoader(self._read, self.memory, kept, self._said.put)

    def _read(self, path: str) -> HostAdapter:
        self.read.append(Path(path).name)
        assert self.may_read.wait(60)
        return read_adapter(Path(path), self.updates, torch.float32, Base)

    def load(self, adapter: Adapter, slot: int = 0) -> AdapterLoaded:
        self.loader.load(LoadAdapter(adapter, slot))
        (loaded,) = self.loaded(1)
        return loaded

    def loaded(self, number: int) -> list[AdapterLoaded]:
        """The next ones that have come."""
        return [self._said.get(timeout=60) for _ in range(number)]


def test_the_last_used_ones_are_kept_on_the_host(tmp_path: Path) -> None:
    own = Loader(kept=2)
    adapters = [own.load(Adapter(name, str(write(tmp_path / name)), "")).adapter for name in "abc"]
    assert own.read == ["a", "b", "c"]
    for adapter, slot in ((adapters[1], 1), (adapters[2], 2), (adapters[0], 1), (adapters[1], 2)):
        assert own.load(adapter, slot) == AdapterLoaded(adapter, slot)
    assert own.read == ["a", "b", "c", "a", "b"]
    own.loader.close()


def test_a_slot_has_what_was_loaded_last(tmp_path: Path) -> None:
    own = Loader()
    a, b = (own.load(Adapter(name, str(write(tmp_path / name)), "")).adapter for name in "ab")
    weights = {}
    for adapter, slot in ((a, 1), (b, 2), (b, 1), (a, 2), (a, 1)):
        own.load(adapter, slot)
        update = own.updates._updates[1].weights
        weights[adapter.name, slot] = update.a[slot - 1].clone()
        assert update.ranks.tolist()[slot - 1] == 4
    assert torch.equal(weights["a", 1], weights["a", 2])
    assert torch.equal(weights["b", 1], weights["b", 2])
    assert not torch.equal(weights["a", 1], weights["b", 1])
    own.loader.close()


def test_files_that_have_changed_are_not_taken_for_what_they_were(tmp_path: Path) -> None:
    own = Loader(kept=1)
    a = own.load(Adapter("a", str(write(tmp_path / "a")), "")).adapter
    own.load(Adapter("b", str(write(tmp_path / "b")), ""))
    write(tmp_path / "a")
    refused = own.load(a, 1)
    assert "have changed" in refused.error
    assert refused.adapter == a
    assert own.load(Adapter("a", a.path, "")).adapter.digest != a.digest
    own.loader.close()


@pytest.mark.parametrize("error", [RuntimeError("no memory"), OSError("gone")])
def test_whatever_goes_wrong_refuses_one_adapter(tmp_path: Path, error: Exception) -> None:
    own = Loader()

    def fail(path: str) -> HostAdapter:
        raise error

    read, own.loader._read = own.loader._read, fail
    assert str(error) in own.load(Adapter("a", "nowhere", "")).error
    own.loader._read = read
    assert not own.load(Adapter("b", str(write(tmp_path / "b")), "")).error
    own.loader.close()


def test_one_that_no_thread_reads_is_refused_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine has no more threads for a moment."""
    own = Loader()

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert "can't start new thread" in own.load(Adapter("a", str(write(tmp_path / "a")), "")).error
    assert not own.load(Adapter("b", str(write(tmp_path / "b")), "")).error
    own.loader.close()


def test_some_are_read_at_once_and_come_in_their_order(tmp_path: Path) -> None:
    """One that is wanted twice is read once."""
    own = Loader(kept=9)
    known = own.load(Adapter("known", str(write(tmp_path / "known")), "")).adapter
    own.loader._host.clear()
    own.read.clear()
    own.may_read.clear()
    adapters = [Adapter(name, str(write(tmp_path / name)), "") for name in "abcdef"]
    wanted = [known, adapters[0], known, *adapters[1:]]
    for number, adapter in enumerate(wanted):
        own.loader.load(LoadAdapter(adapter, 1 + number % 2))
    for _ in range(12_000):
        if len(own.read) == 3:
            break
        time.sleep(0.005)
    time.sleep(0.1)
    assert sorted(own.read) == ["a", "b", "known"], "four of them are on their way"
    own.may_read.set()
    loaded = own.loaded(len(wanted))
    assert [each.adapter.name for each in loaded] == [each.name for each in wanted]
    assert not any(each.error for each in loaded)
    assert sorted(own.read) == ["a", "b", "c", "d", "e", "f", "known"]
    own.loader.close()


def test_what_is_wanted_before_the_end_still_comes(tmp_path: Path) -> None:
    own = Loader()
    for name in "abcdef":
        own.loader.load(LoadAdapter(Adapter(name, str(write(tmp_path / name)), ""), 0))
    own.loader.close()
    assert [each.adapter.name for each in own.loaded(6)] == list("abcdef")
