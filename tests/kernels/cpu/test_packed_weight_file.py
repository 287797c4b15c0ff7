"""Packed weights on disk: what comes back is what was packed, and a file that does not serve is written anew."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.compute.kernels.cpu import packed_weight_file
from quire.compute.kernels.cpu.grouped_linear import grouped_linear, pack_grouped
from quire.compute.kernels.cpu.library import Library, library
from quire.compute.kernels.cpu.linear import PackedWeight, linear, pack_linear
from quire.compute.kernels.cpu.packed_weight_file import LARGE_PAGE, PackedWeightFile
from quire.compute.kernels.reference.gguf_blocks import BlockWeight

ROOT = Path(__file__).parents[3]
PLENTY = 1 << 30


@pytest.fixture
def kernels() -> Library:
    library.cache_clear()
    if (found := library()) is None:
        pytest.skip("there are no kernels of our own")
    return found


def weights(dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {f"w{n}": torch.randn(rows, columns).to(dtype) for n, (rows, columns) in enumerate([(70, 33), (128, 64)])}


class Start:
    """A start that asks for all weights, and remembers which it had to pack."""

    def __init__(self, path: Path, kernels: Library, limit: int = PLENTY) -> None:
        self.packed: list[str] = []
        self.found: dict[str, Any] = {}
        with PackedWeightFile(path, limit, kernels) as file:
            for name, weight in weights().items():
                self.found[name] = file.get(name, self._pack(name, lambda w=weight: pack_linear(w)))
            self.found["plain"] = file.get("plain", self._pack("plain", lambda: weights()["w0"]))
            several = [pack_linear(weight) for weight in weights().values()]
            self.found["several"] = file.get("several", self._pack("several", lambda: several))

    def _pack(self, name: str, pack: Callable[[], Any]) -> Callable[[], Any]:
        def counted() -> Any:
            self.packed.append(name)
            return pack()

        return counted

    def is_right(self) -> bool:
        """Whether everything multiplies, or is, as it should."""
        for (name, weight), other in zip(weights().items(), self.found["several"], strict=True):
            x = torch.randn(3, weight.shape[1]).to(weight.dtype)
            expected = linear(x, pack_linear(weight), None)
            if not all(torch.equal(linear(x, packed, None), expected) for packed in (self.found[name], other)):
                return False
        return torch.equal(self.found["plain"], weights()["w0"])


EVERYTHING = ["w0", "w1", "plain", "several"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "weights" / "one.packed"


def test_a_second_start_packs_nothing(path: Path, kernels: Library) -> None:
    first = Start(path, kernels)
    assert first.packed == EVERYTHING
    second = Start(path, kernels)
    assert not second.packed
    assert first.is_right()
    assert second.is_right()
    assert isinstance(second.found["w0"], PackedWeight)
    assert sorted(entry.suffix for entry in path.parent.iterdir()) == [".lock", ".packed"]


def test_both_starts_hold_the_file_and_no_copy(path: Path, kernels: Library) -> None:
    for start in (Start(path, kernels), Start(path, kernels)):
        address = start.found["w1"].data.data_ptr()
        regions = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
        (region,) = [r for r in regions if int(r[0].split("-")[0], 16) <= address < int(r[0].split("-")[1], 16)]
        assert ".packed" in region[5]


def test_data_lie_in_large_pages_that_were_written_at_once(
    path: Path, kernels: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is what Linux needs to keep them in pages of that size."""
    written, write = [], os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: written.append((at, len(data))) or write(file, data, at))
    large = torch.arange(3 << 20, dtype=torch.int64).to(torch.uint8)
    with PackedWeightFile(path, PLENTY, kernels) as file:
        for name in ("a", "b"):
            assert torch.equal(file.get(name, large.clone), large)
    whole = set()
    for at, length in written:
        if length == LARGE_PAGE and at % LARGE_PAGE == 0 and at not in whole:
            whole.add(at)
        else:
            assert {*range(at // LARGE_PAGE * LARGE_PAGE, at + length, LARGE_PAGE)} <= whole
    assert len(whole) == 3
    with PackedWeightFile(path, PLENTY, kernels) as file:
        assert all(torch.equal(file.get(name, large.clone), large) for name in ("a", "b"))


def test_integers_are_kept_too_and_what_cannot_be_is_no_reason_to_write_the_file_anew(
    path: Path, kernels: Library
) -> None:
    codes, scales = torch.randint(0, 16, (40, 64), dtype=torch.uint8), torch.rand((40, 2))

    def start(packed: list[Any]) -> tuple[Any, Any]:
        with PackedWeightFile(path, PLENTY, kernels) as file:
            kept = file.get("kept", lambda: packed.append(0) or pack_grouped(codes, scales, None, 4, 32, None))
            other = file.get("other", lambda: pack_grouped(codes, scales, None, 4, 32, torch.arange(64)))
        return kept, other

    packed: list[Any] = []
    x = torch.randn((2, 64))
    expected = grouped_linear(x, pack_grouped(codes, scales, None, 4, 32, None), None)
    for _ in range(3):
        kept, other = start(packed)
        assert isinstance(kept, BlockWeight)
        assert torch.equal(grouped_linear(x, kept, None), expected)
        assert torch.equal(grouped_linear(x, other, None), expected)
    assert len(packed) == 1


@pytest.mark.parametrize("fault", ["truncated", "empty", "garbage", "longer", "index", "lacks data", "shifted"])
def test_a_broken_file_is_written_anew(path: Path, kernels: Library, fault: str) -> None:
    Start(path, kernels)
    whole = path.read_bytes()
    broken = {
        "truncated": whole[:-1000],
        "empty": b"",
        "garbage": os.urandom(len(whole)),
        "longer": whole + bytes(8),
        "index": whole.replace(b'"rows": 70', b'"rows": 71'),
        "lacks data": whole[packed_weight_file.PAGE :],
        "shifted": bytes(packed_weight_file.PAGE) + whole,
    }
    path.unlink()  # what is mapped stays as it is
    path.write_bytes(broken[fault])
    again = Start(path, kernels)
    assert again.packed == EVERYTHING
    assert again.is_right()
    assert path.read_bytes() == whole
    assert not Start(path, kernels).packed


def test_a_file_of_other_code_lacks_names_and_is_written_anew(path: Path, kernels: Library) -> None:
    with PackedWeightFile(path, PLENTY, kernels) as file:
        file.get("w0", lambda: pack_linear(weights()["w0"]))
    assert Start(path, kernels).packed == EVERYTHING[1:]
    assert Start(path, kernels).packed == EVERYTHING
    assert not Start(path, kernels).packed


def test_a_start_that_fails_leaves_no_file(path: Path, kernels: Library) -> None:
    def fail() -> Tensor:
        raise RuntimeError("no such tensor")

    def start() -> None:
        with PackedWeightFile(path, PLENTY, kernels) as file:
            file.get("w0", lambda: pack_linear(weights()["w0"]))
            file.get("w1", fail)

    with pytest.raises(RuntimeError, match="no such tensor"):
        start()
    assert [entry.suffix for entry in path.parent.iterdir()] == [".lock"]
    assert Start(path, kernels).packed == EVERYTHING


def test_a_full_disk_costs_only_the_file(
    path: Path, kernels: Library, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def pwrite(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", pwrite)
        start = Start(path, kernels)
    assert start.is_right()
    assert caplog.text.count("No space left") == 1
    assert not path.exists()
    assert Start(path, kernels).packed == EVERYTHING


def test_where_nothing_can_be_written_weights_are_packed(tmp_path: Path, kernels: Library) -> None:
    (tmp_path / "file").write_text("not a directory")
    assert Start(tmp_path / "file" / "one.packed", kernels).is_right()


def test_the_least_recently_used_files_make_room(path: Path, kernels: Library) -> None:
    names = [path.with_name(f"{name}.packed") for name in ("a", "b", "c")]
    for seconds, name in enumerate(names):
        Start(name, kernels)
        os.utime(name, (seconds, seconds))
    Start(names[0], kernels)  # a is used again
    size = path.with_name("a.packed").stat().st_size
    (path.parent / "killed.packed.partial").write_bytes(b"half")
    with (path.parent / "held.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # by a process that is writing now
        (path.parent / "held.packed.partial").write_bytes(b"half")
        Start(path, kernels, limit=2 * size + size // 2)
    left = {entry.name for entry in path.parent.iterdir() if entry.suffix != ".lock"}
    assert left == {"one.packed", "a.packed", "held.packed.partial"}


def test_of_two_processes_one_packs(path: Path, kernels: Library) -> None:
    """They start together; all have the weights, and what each packed adds up to one start's."""
    program = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1]); "
        "from tests.kernels.cpu.test_packed_weight_file import Start; "
        "from quire.compute.kernels.cpu.library import library; "
        "start = Start(Path(sys.argv[2]), library()); print(len(start.packed), start.is_right())"
    )
    command = [sys.executable, "-c", program, str(ROOT), str(path)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = sorted(process.communicate()[0].split() for process in processes)
    assert said == [["0", "True"], ["4", "True"]]
