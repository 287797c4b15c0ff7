"""Measures how long each kernel of a GPU takes, with torch's profiler. Used by benchmarks."""

from __future__ import annotations

import torch
from torch.profiler import ProfilerActivity, profile

KernelTimes = dict[str, tuple[float, int]]
"""Microseconds and number of launches, by kernel."""


class KernelProfile:
    """Profiles this process's GPU from its construction until `end`."""

    def __init__(self) -> None:
        torch.cuda.synchronize()
        self._profile = profile(activities=[ProfilerActivity.CUDA])
        self._profile.start()

    def end(self) -> KernelTimes:
        """End the profile, and return the kernels that ran since the constructor."""
        torch.cuda.synchronize()
        self._profile.stop()
        return {
            event.key: (event.self_device_time_total, event.count)
            for event in self._profile.key_averages()
            if event.device_type.name == "CUDA"
        }
