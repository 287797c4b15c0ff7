"""What a benchmark was measured on, and what a bug report needs: processor, memory, GPUs, versions. No secrets."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from itertools import combinations
from pathlib import Path
from typing import Any

import pynvml

from quire.version import __version__

LIBRARIES = (
    "torch", "triton", "numpy", "safetensors", "tokenizers", "huggingface_hub", "jinja2", "msgspec", "pyzmq", "fastapi",
    "uvicorn", "uvloop", "httptools", "httpx", "prometheus_client", "tyro", "rich", "PyYAML", "transformers",
    "xgrammar",
)  # fmt: skip
PROCESSOR_FLAGS = (
    "avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8", "asimd", "bf16",
    "sve",
)  # fmt: skip
_TOPOLOGY = {
    pynvml.NVML_TOPOLOGY_INTERNAL: "same board",
    pynvml.NVML_TOPOLOGY_SINGLE: "PIX",
    pynvml.NVML_TOPOLOGY_MULTIPLE: "PXB",
    pynvml.NVML_TOPOLOGY_HOSTBRIDGE: "PHB",
    pynvml.NVML_TOPOLOGY_NODE: "NODE",
    pynvml.NVML_TOPOLOGY_SYSTEM: "SYS",
}
_P2P_READ = 0
"""NVML_P2P_CAPS_INDEX_READ, which is a tuple in the package."""


def system_info() -> dict[str, Any]:
    """Facts about this machine, as plain data for JSON."""
    flags = (_cpuinfo("flags") or _cpuinfo("Features")).split()
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": _cpuinfo("model name") or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "processor_flags": [flag for flag in PROCESSOR_FLAGS if flag in flags],
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "memory_limit_bytes": _memory_limit(),
        "gpus": gpus(),
        "gpu_links": gpu_links(),
    }


def versions() -> dict[str, str]:
    found = {"quire": __version__, "python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def gpus() -> list[dict[str, str]]:
    """NVIDIA GPUs as their driver describes them; empty without a driver."""
    try:
        with _driver() as handles:
            version = pynvml.nvmlSystemGetDriverVersion() if handles else ""
            return [_gpu(handle, version) for handle in handles]
    except pynvml.NVMLError as error:
        return [{"error": f"the driver's library says: {error}"}]


def gpu_links() -> dict[str, str]:
    """The links between each two GPUs, by their numbers; empty with one GPU, or without a driver.

    A link is `NV18` for 18 NVLinks, or else what lies between the GPUs, in the words of `nvidia-smi topo -m`. It says
    if a GPU cannot read the other's memory.
    """
    try:
        with _driver() as handles:
            pairs = combinations(range(len(handles)), 2)
            return {f"{one}-{other}": _link(handles[one], handles[other]) for one, other in pairs}
    except pynvml.NVMLError as error:
        return {"error": f"the driver's library says: {error}"}


@contextmanager
def _driver() -> Iterator[list[Any]]:
    """The GPUs' handles; empty without a driver."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield []
        return
    try:
        yield [pynvml.nvmlDeviceGetHandleByIndex(n) for n in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()


def _link(one: Any, other: Any) -> str:
    if pynvml.nvmlDeviceGetP2PStatus(one, other, pynvml.NVML_P2P_CAPS_INDEX_NVLINK) == pynvml.NVML_P2P_STATUS_OK:
        link = f"NV{_active_links(one)}"
    else:
        level = pynvml.nvmlDeviceGetTopologyCommonAncestor(one, other)
        link = _TOPOLOGY.get(level, f"level {level}")
    reads = pynvml.nvmlDeviceGetP2PStatus(one, other, _P2P_READ) == pynvml.NVML_P2P_STATUS_OK
    return link if reads else f"{link}, no peer access"


def _active_links(handle: Any) -> int:
    active = 0
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        try:
            active += pynvml.nvmlDeviceGetNvLinkState(handle, link)
        except pynvml.NVMLError:  # the card has no more
            break
    return active


def _gpu(handle: Any, driver: str) -> dict[str, str]:
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    return {
        "name": pynvml.nvmlDeviceGetName(handle),
        "memory.total": f"{pynvml.nvmlDeviceGetMemoryInfo(handle).total // 2**20} MiB",
        "driver_version": driver,
        "compute_cap": f"{major}.{minor}",
    }


def _cpuinfo(key: str) -> str:
    for line in _read("/proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""


def _memory_limit() -> int | None:
    limit = _read("/sys/fs/cgroup/memory.max").strip()
    return int(limit) if limit.isdigit() else None


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
