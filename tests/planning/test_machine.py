"""What a machine is said to have: the GPU that CUDA will call the first."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from quire.compute.kernels.cpu.build import Processor
from quire.foundation.config import environment
from quire.planning import machine

UUIDS = ["GPU-11aa-1", "GPU-22bb-2", "GPU-22cc-3"]


@pytest.fixture
def three_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver of three cards whose handles are their numbers, beside a torch that was built for it."""

    def by_uuid(uuid: str) -> int:
        if uuid not in UUIDS:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return UUIDS.index(uuid)

    answers: dict[str, Any] = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: len(UUIDS),
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetHandleByUUID": by_uuid,
        "nvmlDeviceGetUUID": UUIDS.__getitem__,
        "nvmlDeviceGetName": "card {}".format,
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=80, free=70),
        "nvmlDeviceGetCudaComputeCapability": lambda handle: (9, 0) if handle else (7, 5),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, answer)
    monkeypatch.setattr(machine.metadata, "version", lambda package: "2.11.0+cu130")


@pytest.mark.parametrize(
    ("visible", "name"),
    [("1", "card 1"), ("2,1", "card 2"), (" 1 , 0", "card 1"), ("GPU-22cc-3", "card 2"), ("GPU-22b,GPU-11", "card 1")],
)
@pytest.mark.usefixtures("three_gpus")
def test_the_first_that_cuda_sees(monkeypatch: pytest.MonkeyPatch, visible: str, name: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    gpu = machine.this_machine().gpu
    assert gpu == machine.Gpu(name, (9, 0), 80, 70, of=len(visible.split(",")))


@pytest.mark.parametrize(("visible", "seen"), [(None, ["0", "1", "2"]), ("2,GPU-11", ["2", "GPU-11"]), ("1", ["1"])])
@pytest.mark.usefixtures("three_gpus")
def test_engine_i_sees_the_gpu_at_place_i_alone(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, seen: list[str]
) -> None:
    for engine, gpu in enumerate(seen):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert environment.num_visible_gpus(installed=3) == len(seen)
        environment.show_gpus_of_engine(engine)
        assert environment.visible_gpus() == [gpu]
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert environment.gpu_of_engine(len(seen)) is None


@pytest.mark.parametrize(
    ("visible", "seen"), [(None, ["0", "1", "2", "3"]), ("6,GPU-11,3,2,9", ["6", "GPU-11", "3", "2"])]
)
def test_a_ranks_own_gpu_is_its_first(monkeypatch: pytest.MonkeyPatch, visible: str | None, seen: list[str]) -> None:
    """Of two engines with two ranks each: all GPUs of the engine are seen, in each rank by another number."""
    for engine, rank in product(range(2), range(2)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible or "")
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
        environment.show_gpus_of_engine(engine, 2)
        environment.show_gpu_of_rank_first(rank, 2)
        own, other = engine * 2 + rank, engine * 2 + 1 - rank
        assert environment.visible_gpus() == [seen[own], seen[other]]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    environment.show_gpu_of_rank_first(2, 3)  # of the only engine, which has shown nothing
    assert environment.visible_gpus() == ["2", "0", "1"]


@pytest.mark.parametrize(
    ("visible", "reason"),
    [
        ("", "CUDA_VISIBLE_DEVICES hides every GPU"),
        ("0", "card 0 is too old: compute capability 7.5"),
        ("GPU-22", "the NVIDIA driver says"),  # there are two
        ("GPU-9", "the NVIDIA driver says"),
    ],
)
@pytest.mark.usefixtures("three_gpus")
def test_why_there_is_none(monkeypatch: pytest.MonkeyPatch, visible: str, reason: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    here = machine.this_machine()
    assert here.gpu is None
    assert reason in here.why_no_gpu


@pytest.mark.parametrize(
    ("features", "instructions", "compiler", "fast"),
    [
        ({"avx512_bf16"}, "none", "sh", True),
        ({"asimd", "bf16"}, "", "sh", True),  # Arm
        ({"avx2", "fma", "f16c"}, "", "sh", True),
        ({"avx2", "fma", "f16c"}, "", "no-such-compiler", False),
        ({"avx2", "fma", "f16c"}, "none", "sh", False),
        ({"avx"}, "", "sh", False),
    ],
)
def test_bfloat16_is_fast_with_instructions_or_our_kernels(
    monkeypatch: pytest.MonkeyPatch, features: set[str], instructions: str, compiler: str, fast: bool
) -> None:
    monkeypatch.setattr(machine, "this_processor", lambda: Processor("", frozenset(features)))
    monkeypatch.setenv("QUIRE_CPU_ISA", instructions)
    monkeypatch.setenv("CXX", compiler)
    assert machine.this_machine().fast_bfloat16 == fast
