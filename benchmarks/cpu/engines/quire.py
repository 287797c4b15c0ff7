"""Quire, of this checkout, with the interpreter that runs the comparison."""

from __future__ import annotations

from collections.abc import Sequence

from int8_checkpoint import SUFFIX

from engines import vllm_api
from quire import LLM, SamplingParams
from quire.version import __version__

PACKAGES = None


class Engine:
    """See the package."""

    version = __version__

    def __init__(self, checkpoint: str, max_running: int) -> None:
        cache = "int8" if checkpoint.endswith(SUFFIX) else "auto"
        self._llm = LLM(
            checkpoint, dtype="bfloat16", kv_cache_dtype=cache, skip_tokenizer_init=True, max_num_seqs=max_running
        )

    def generate(self, prompts: Sequence[list[int]], outputs: Sequence[int]) -> list[int]:
        return vllm_api.generate(self._llm, SamplingParams, prompts, outputs)
