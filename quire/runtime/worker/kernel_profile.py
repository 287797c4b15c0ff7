"""What a GPU's kernels take over a stretch of time, by torch's profiler. For benchmarks."""

from __future__ import annotations

import torch
from torch.profiler import ProfilerActivity, profile

KernelTimes = dict[str, tuple[float, int]]
"""Microseconds and number of launches, by kernel."""


class KernelProfile:
    """A profile of this process's GPU; begins when it is made."""

    def __init__(self) -> None:
        torch.cuda.synchronize()
        self._profile = profile(activities=[ProfilerActivity.CUDA])
        self._profile.start()

    def end(self) -> KernelTimes:
        """End the profile; returns what ran since it began."""
        torch.cuda.synchronize()
        self._profile.stop()
        return {
            event.key: (event.self_device_time_total, event.count)
            for event in self._profile.key_averages()
            if event.device_type.name == "CUDA"
        }
