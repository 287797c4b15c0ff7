"""Runs every kernel once on the benchmark's small cases, for tools that watch a card's memory:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python -m tests.kernels.triton.run_cases [OP …]

and the same with `--tool racecheck`. Says which ops ran. Without torch's cache every tensor is an allocation of its
own, so that a step beyond its end is seen.
"""

from __future__ import annotations

import sys

import torch

from quire.compute.kernels.dispatch import KERNELS, kernel
from quire.tools.bench.kernels import all_cases


def main(ops: list[str]) -> int:
    """Run; the exit code."""
    device = torch.device("cuda")
    ran: dict[str, int] = {}
    for case in all_cases(torch.device("cpu")):  # the small ones
        if "triton" not in KERNELS.get((case.op, "cuda"), "") or (ops and case.op not in ops):
            continue
        args, kwargs = case.make(device)
        kernel(case.op, "cuda")(*args, **kwargs)
        torch.cuda.synchronize()
        ran[case.op] = ran.get(case.op, 0) + 1
    print(*(f"{op} {count} ×" for op, count in ran.items()), sep="\n")
    return int(not ran)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
