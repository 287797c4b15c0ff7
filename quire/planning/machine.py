"""What this machine has: memory, a processor with or without bfloat16, and an NVIDIA GPU if torch can use one.

Found without importing torch: from /proc, /sys, NVML and the version of the installed torch.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from quire.compute.kernels.cpu.build import can_build, this_processor
from quire.foundation.config import environment

OLDEST_CAPABILITY = (8, 0)
"""The oldest GPUs that are served: the first with bfloat16 matrix products."""


@dataclass(frozen=True)
class Gpu:
    """An NVIDIA GPU, whose `free_bytes` no process has taken. `of` is the number of GPUs that this process may use,
    including this one."""

    name: str
    capability: tuple[int, int]
    memory_bytes: int
    free_bytes: int
    of: int = 1


@dataclass(frozen=True)
class Machine:
    """What automatic choices look at.

    Attributes:
        memory_bytes: Main memory that is available now.
        fast_bfloat16: Whether bfloat16 is at least as fast as float32 on the processor: it has instructions for it, or
            our own kernels read half the bytes.
        gpu: The first GPU that this process may use; None if there is none, or it cannot be served.
        own_kernels: Whether our own kernels are likely to serve the processor; else torch computes, and takes more
            memory.
    """

    memory_bytes: int
    fast_bfloat16: bool
    gpu: Gpu | None = None
    why_no_gpu: str = "no NVIDIA driver was found"
    own_kernels: bool = True


def this_machine() -> Machine:
    available = _meminfo("MemAvailable") or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _read("/sys/fs/cgroup/memory.max")
    if limit.isdigit():
        used = _read("/sys/fs/cgroup/memory.current")
        available = min(available, int(limit) - int(used or 0))
    processor, kernels = this_processor(), environment.native_kernels()
    own_kernels = can_build(kernels.compilers, processor, kernels.instructions)
    gpu, reason = _first_gpu()
    return Machine(available, processor.multiplies_bfloat16 or own_kernels, gpu, reason, own_kernels)


def _first_gpu() -> tuple[Gpu | None, str]:
    """The GPU that torch will call `cuda:0`, or why there is none."""
    torch = metadata.version("torch")
    if torch.endswith("+cpu"):
        return None, f"torch {torch} was built for the CPU only"
    import pynvml  # a hundredth of a second, for which processes without a GPU are not to wait

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None, "no NVIDIA driver was found"
    try:
        if not (visible_gpus := environment.visible_gpus()):
            return None, "CUDA_VISIBLE_DEVICES hides every GPU"
        handle = handle_of(visible_gpus[0])
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
        visible = environment.num_visible_gpus(pynvml.nvmlDeviceGetCount())
        gpu = Gpu(pynvml.nvmlDeviceGetName(handle), (major, minor), memory.total, memory.free, visible)
    except pynvml.NVMLError as error:
        return None, f"the NVIDIA driver says: {error}"
    finally:
        pynvml.nvmlShutdown()
    if gpu.capability < OLDEST_CAPABILITY:
        return None, f"{gpu.name} is too old: compute capability {major}.{minor}, and 8.0 or newer is served"
    return gpu, ""


def handle_of(gpu: str) -> Any:
    """NVML's handle of a GPU by its PCI bus order or by its UUID, of which a prefix is enough, as for CUDA."""
    import pynvml

    if gpu.isdigit():
        return pynvml.nvmlDeviceGetHandleByIndex(int(gpu))
    handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
    found = [handle for handle in handles if pynvml.nvmlDeviceGetUUID(handle).startswith(gpu)]
    return found[0] if len(found) == 1 else pynvml.nvmlDeviceGetHandleByUUID(gpu)


def _meminfo(key: str) -> int:
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    return 0


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
