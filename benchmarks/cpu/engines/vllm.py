"""vLLM's CPU build: the wheel that the project's CPU backend is published as, with the settings its guide names."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; read when vllm is imported
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

from vllm import LLM, SamplingParams
from vllm import __version__ as version

from engines import vllm_api

PACKAGES = ("vllm-cpu",)


class Engine:
    """See the package."""

    version = version

    def __init__(self, checkpoint: str, max_running: int) -> None:
        settings = {"skip_tokenizer_init": True, "max_num_seqs": max_running, "max_model_len": 1024}
        # Without the instructions its products of bfloat16 are torch's, of which a start alone computes minutes.
        dtype = "bfloat16" if "avx512_bf16" in Path("/proc/cpuinfo").read_text() else "float32"
        self._llm = LLM(checkpoint, dtype=dtype, **settings)

    def generate(self, prompts: Sequence[list[int]], outputs: Sequence[int]) -> list[int]:
        return vllm_api.generate(self._llm, SamplingParams, prompts, outputs)
