"""What Quire and vLLM have in common: an `LLM` and its `SamplingParams`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def generate(llm: Any, sampling: Any, prompts: Sequence[list[int]], outputs: Sequence[int]) -> list[int]:
    """See the package."""
    params = [sampling(temperature=0.0, max_tokens=n, min_tokens=n, ignore_eos=True, detokenize=False) for n in outputs]
    results = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return [len(result.outputs[0].token_ids) for result in results]
