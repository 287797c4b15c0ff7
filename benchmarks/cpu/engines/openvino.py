"""OpenVINO GenAI's continuous batching, with the model that optimum-intel exports from the checkpoint once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import openvino
import openvino_genai
from int8_checkpoint import SUFFIX

PACKAGES = ("openvino-genai", "openvino-tokenizers", "optimum-intel[openvino]")
_CACHE_GB = 1


class Engine:
    """See the package."""

    version = openvino_genai.__version__

    def __init__(self, checkpoint: str, max_running: int) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_seqs = max_running
        scheduler.cache_size = _CACHE_GB
        scheduler.enable_prefix_caching = False
        known = openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        precision = "bf16" if "BF16" in known else "f32"  # without the instructions it takes nothing else
        cache = "u8" if checkpoint.endswith(SUFFIX) else precision
        properties = {"INFERENCE_PRECISION_HINT": precision, "KV_CACHE_PRECISION": cache}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            str(_exported(Path(checkpoint))), scheduler, "CPU", properties
        )

    def generate(self, prompts: Sequence[list[int]], outputs: Sequence[int]) -> list[int]:
        inputs = [openvino.Tensor(np.array([prompt], np.int64)) for prompt in prompts]
        configs = [
            openvino_genai.GenerationConfig(max_new_tokens=n, min_new_tokens=n, ignore_eos=True, do_sample=False)
            for n in outputs
        ]
        results = self._pipeline.generate(inputs, configs)
        return [len(result.m_generation_ids[0]) for result in results]


def _exported(checkpoint: Path) -> Path:
    """Of a checkpoint of int8, which optimum-intel does not read, the one that it was made from, quantized anew."""
    target = checkpoint / "openvino"
    if not (target / "openvino_model.xml").exists():
        partial, int8 = target.with_suffix(".partial"), checkpoint.name.endswith(SUFFIX)
        source = checkpoint.with_name(checkpoint.name.removesuffix(SUFFIX))
        command = [str(Path(sys.executable).with_name("optimum-cli")), "export", "openvino", "--model", str(source)]
        command += ["--task", "text-generation-with-past", "--weight-format", "int8" if int8 else "fp16", str(partial)]
        subprocess.run(command, check=True, stdout=sys.stderr)
        os.replace(partial, target)
    return target
