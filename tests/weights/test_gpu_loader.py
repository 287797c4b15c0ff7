"""Bytes on their way to a device, with a device that copies as late as it may."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quire.errors import CheckpointError
from quire.models.weights.gpu_loader import FileTensor, GpuTensorLoader

BUFFER_BYTES = 160


class LazyDevice:
    """Copies nothing until it has to: a buffer that is filled again too early shows in what arrives."""

    def __init__(self) -> None:
        self._asked: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._ordered = False
        self.pinned = 0

    def pin(self, buffer: Tensor) -> None:
        self.pinned += buffer.nbytes

    def unpin(self, buffer: Tensor) -> None:
        self.pinned -= buffer.nbytes

    def scratch(self, size: int) -> Tensor:
        return torch.full((size,), 255, dtype=torch.uint8)

    def wait_for_caller(self) -> None:
        self._ordered = True

    def make_caller_wait(self) -> None:
        self._run(len(self._asked))

    def copy(self, out: Tensor, source: Tensor) -> None:
        assert self._ordered, "memory may still be in use by what the caller asked before"
        out[..., :0].copy_(source[..., :0])  # torch's checks come when it is asked
        with self._lock:
            self._asked.append(lambda: out.copy_(source))

    def record_event(self) -> _Mark:
        with self._lock:
            return _Mark(self, len(self._asked))

    def _run(self, until: int) -> None:
        with self._lock:
            for number in range(until):
                ask, self._asked[number] = self._asked[number], lambda: None
                with torch.inference_mode():
                    ask()


class _Mark:
    def __init__(self, device: LazyDevice, until: int) -> None:
        self._device, self._until = device, until

    def synchronize(self) -> None:
        self._device._run(self._until)


@pytest.fixture
def device() -> LazyDevice:
    return LazyDevice()


@pytest.fixture
def loader(device: LazyDevice) -> Iterator[GpuTensorLoader]:
    loader = GpuTensorLoader(device, buffers=3, buffer_bytes=BUFFER_BYTES, threads=4)
    yield loader
    loader.close()


@pytest.fixture
def write(tmp_path: Path) -> Iterator[Callable[[Tensor], FileTensor]]:
    """Puts a tensor into a file, behind other bytes."""
    files = []

    def put(values: Tensor) -> FileTensor:
        path = tmp_path / str(len(files))
        path.write_bytes(b"before!" + values.contiguous().view(-1).view(torch.uint8).numpy().tobytes() + b"after")
        files.append(os.open(path, os.O_RDONLY))
        return FileTensor(files[-1], len(b"before!"), tuple(values.shape), values.dtype)

    yield put
    for file in files:
        os.close(file)


Write = Callable[[Tensor], FileTensor]

WINDOWS: list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = [
    # shape, window, start
    ((5,), (5,), (0,)),
    ((1000,), (1000,), (0,)),
    ((1000,), (70,), (33,)),
    ((), (), ()),
    ((31, 17), (31, 17), (0, 0)),
    ((31, 17), (9, 17), (20, 0)),
    ((31, 17), (31, 4), (0, 3)),
    ((31, 17), (1, 4), (30, 13)),
    ((31, 17), (9, 1), (2, 16)),
    ((4, 6, 10), (4, 6, 10), (0, 0, 0)),
    ((4, 6, 10), (1, 3, 10), (2, 3, 0)),
    ((4, 6, 10), (1, 2, 3), (3, 1, 7)),
    ((4, 6, 10), (2, 3, 10), (1, 2, 0)),
    ((4, 6, 10), (3, 2, 5), (1, 4, 5)),
]


@pytest.mark.parametrize(("shape", "window", "start"), WINDOWS)
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_windows_of_every_shape_and_dtype(
    shape: tuple[int, ...], window: tuple[int, ...], start: tuple[int, ...], stored: torch.dtype, wanted: torch.dtype,
    loader: GpuTensorLoader, write: Write,
) -> None:  # fmt: skip
    values = torch.randn(shape).to(stored)
    out = torch.full(window, float("nan"), dtype=wanted)
    loader.read(write(values), out, start)
    expected = values[tuple(slice(s, s + n) for s, n in zip(start, window, strict=True))]
    assert torch.equal(out, expected.to(wanted))


def test_an_output_with_gaps_is_filled_and_its_gaps_are_kept(loader: GpuTensorLoader, write: Write) -> None:
    values, around = torch.randn(40, 6), torch.zeros(40, 10)
    loader.read(write(values), around[:, 2:8])
    assert torch.equal(around[:, 2:8], values)
    assert around[:, :2].eq(0).all()
    assert around[:, 8:].eq(0).all()


def test_many_tensors_from_many_threads(loader: GpuTensorLoader, write: Write) -> None:
    stored = [torch.randn(n) for n in range(1, 90, 3)]
    files = [write(values) for values in stored]
    outs = [torch.full_like(values, float("nan")) for values in stored]
    threads = [threading.Thread(target=loader.read, args=pair) for pair in zip(files, outs, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(out, values) for out, values in zip(outs, stored, strict=True))


def test_weights_made_in_inference_mode_are_filled_by_other_threads(loader: GpuTensorLoader, write: Write) -> None:
    values = torch.randn(500)
    with torch.inference_mode():
        out = torch.full((500,), float("nan"))
        loader.read(write(values), out)
    assert torch.equal(out, values)


def test_a_file_that_shrank_is_said(loader: GpuTensorLoader, write: Write) -> None:
    stored = write(torch.randn(300))
    os.truncate(f"/proc/self/fd/{stored.file}", 700)
    with pytest.raises(CheckpointError, match="cut short"):
        loader.read(stored, torch.empty(300))
    again = torch.randn(50)
    loader.read(write(again), out := torch.empty(50))  # no buffer is lost
    assert torch.equal(out, again)


def test_memory_is_pinned_while_it_is_needed(device: LazyDevice) -> None:
    loader = GpuTensorLoader(device, buffers=3, buffer_bytes=BUFFER_BYTES, threads=1)
    assert device.pinned == 3 * BUFFER_BYTES
    loader.close()
    assert device.pinned == 0
