"""Run by test_memory: a mixture of experts whose tokens all go to the same ones; says as JSON what a step took.

python -m tests.costmodel.measure_experts TOKENS HIDDEN WIDTH EXPERTS
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import torch

from quire.compute.kernels.dispatch import kernel
from quire.compute.kernels.routing import Routing
from quire.runtime.worker.host_memory import trim_heap


def status(key: str) -> int:
    """Bytes, from /proc/self/status."""
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


def main() -> None:
    tokens, hidden, width, count = map(int, sys.argv[1:])
    torch.set_num_threads(2)
    pack, experts, route = (kernel(name, "cpu") for name in ("pack_experts", "experts", "route"))
    with torch.inference_mode():
        gate_up, down = pack(torch.randn(count, 2 * width, hidden)), pack(torch.randn(count, hidden, width))

        def run(x: torch.Tensor) -> None:
            weights, numbers = route(torch.randn(len(x), count), Routing(count, True))
            experts(x, gate_up, down, numbers, weights, torch.empty_like(x))

        run(torch.randn(64, hidden))  # the threads and what they hold are torch's, not the step's
        x = torch.randn(tokens, hidden)
        trim_heap()
        before = status("RssAnon")
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
        run(x)
        print(json.dumps(status("VmHWM") - status("RssFile") - before))


if __name__ == "__main__":
    main()
