"""The start on a card: kernels are compiled side by side, by other processes where there are cores for them, and none
is begun in the middle of serving.
"""

from __future__ import annotations

import os
import random
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.compute.kernels.triton.launching.compiler_processes import MIN_CORES
from tests.checkpoints import make_llama, make_tiny
from tests.parity.cases import CASES

pytestmark = pytest.mark.gpu

PARAMS = (
    SamplingParams(temperature=0, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=0.7, top_k=5, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=0.9, top_p=0.8, seed=1, max_tokens=3, logprobs=2, prompt_logprobs=1),
    SamplingParams(temperature=1.0, min_p=0.1, presence_penalty=0.4, max_tokens=5, min_tokens=4),
    SamplingParams(temperature=0, repetition_penalty=1.2, logit_bias={3: 1.0}, max_tokens=30, ignore_eos=True),
    SamplingParams(n=3, temperature=1.0, max_tokens=8, ignore_eos=True),
)


@pytest.mark.parametrize("case", ["llama", "qwen3 moe", "gemma3"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_no_compilation_begins_once_an_engine_is_ready(
    case: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton import knobs

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    _forget()
    compiled: list[tuple[str, str]] = []  # kernel, thread
    on_disk: list[bool] = []  # whether it was there already, so that the thread only loaded it

    def listen(*, src: Any, cache_hit: bool, **_: object) -> None:
        compiled.append((src.fn.__name__, threading.current_thread().name))
        on_disk.append(cache_hit)

    monkeypatch.setattr(knobs.compilation, "listener", listen)
    choose = random.Random(0)
    with LLM(str(_model(case, tmp_path / "model")), dtype=dtype, **_settings()) as llm:
        assert {"rehearsal", "compile"} <= llm.startup.keys()
        assert (ready := len(compiled)) > 20
        for number in (1, 2, 40):
            lengths = [choose.choice((1, 2, 17, 130, 300, 480)) for _ in range(number)]
            prompts = [{"prompt_token_ids": [choose.randrange(3, 300) for _ in range(n)]} for n in lengths]
            llm.generate(prompts, [choose.choice(PARAMS) for _ in prompts], use_tqdm=False)
    assert all(on_disk) or len(os.sched_getaffinity(0)) < MIN_CORES
    # No launch compiles what was not begun. What only some requests need may come to its end once the engine is ready.
    assert [each for each in compiled if not each[1].startswith("compile ")] == []
    assert [each for each in compiled[ready:] if not each[1].startswith("compile later")] == []


def _forget() -> None:
    """As in a new process: what engines of earlier tests compiled is not there."""
    from triton.runtime.jit import JITFunction

    from quire.compute.kernels.triton.launching.launch import Kernel

    for name, module in list(sys.modules.items()):
        for kernel in vars(module).values() if name.startswith("quire.compute.kernels.triton") else ():
            if isinstance(kernel, Kernel):
                kernel._known.clear()
            function = kernel.function if isinstance(kernel, Kernel) else kernel
            if isinstance(function, JITFunction):
                function.device_caches.clear()
                function.hash, function.used_global_vals = None, {}  # its key on disk


def _model(case: str, directory: Path) -> Path:
    if case == "llama":
        return make_llama(directory, hidden=256, heads=4, kv_heads=2, head_dim=128, tokenizer=False)
    return make_tiny(directory, **CASES[case])


def _settings() -> dict[str, Any]:
    """Few blocks, so that there are preemptions, swaps and copies too."""
    return {
        "device": "cuda",
        "skip_tokenizer_init": True,
        "max_num_seqs": 24,
        "max_num_batched_tokens": 400,
        "num_gpu_blocks_override": 150,
        "max_model_len": "auto",  # as long as these blocks allow
    }
