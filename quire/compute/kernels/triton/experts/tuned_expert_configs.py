"""Configs of the products of a mixture of experts, by its shape and the number of tokens.

Written by tuning/h200/tune_experts.py on an NVIDIA H200.
"""

from __future__ import annotations

from quire.compute.kernels.triton.experts.expert_gemms import Table
from quire.compute.kernels.triton.linear.gemm import GemmConfig
from quire.compute.kernels.triton.linear.gemv import GemvConfig

CONFIGS: Table = {
    (128, 8, 2048, 768): (
        (2, (GemvConfig(4, 2048, 8), GemvConfig(2, 256, 1))),
        (8, (GemvConfig(4, 1024, 4), GemvConfig(4, 256, 4))),
        (128, (GemmConfig(16, 64, 128, 1, 4, 3, True), GemmConfig(16, 64, 128, 1, 4, 4, True))),
        (256, (GemmConfig(32, 128, 64, 1, 4, 4, True), GemmConfig(32, 128, 64, 1, 4, 5, True))),
        (512, (GemmConfig(64, 128, 64, 1, 4, 3, True), GemmConfig(64, 128, 64, 1, 4, 4, False))),
        (2048, (GemmConfig(128, 256, 64, 1, 8, 4, False), GemmConfig(128, 256, 64, 1, 8, 4, False))),
        (float("inf"), (GemmConfig(128, 256, 64, 1, 8, 4, False), GemmConfig(128, 128, 64, 1, 4, 3, False))),
    ),
    (8, 2, 4096, 14336): (
        (1, (GemvConfig(4, 2048, 8), GemvConfig(2, 256, 1))),
        (32, (GemmConfig(16, 64, 128, 1, 4, 3, True), GemmConfig(16, 64, 128, 1, 4, 4, True))),
        (64, (GemmConfig(32, 128, 64, 1, 4, 4, True), GemmConfig(32, 128, 64, 1, 4, 5, True))),
        (256, (GemmConfig(128, 256, 64, 1, 8, 4, False), GemmConfig(128, 256, 64, 1, 8, 4, False))),
        (512, (GemmConfig(128, 128, 64, 1, 4, 3, False), GemmConfig(128, 128, 64, 1, 8, 4, False))),
        (float("inf"), (GemmConfig(128, 256, 64, 1, 8, 4, False), GemmConfig(128, 256, 64, 1, 8, 4, False))),
    ),
}

OVERLAP = True
"""Start while the kernel before ends; see dependent_launch."""
