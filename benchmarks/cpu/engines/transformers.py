"""HF transformers' `generate`: as many requests at a time as may run, padded on the left to one length."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM
from transformers import __version__ as version

PACKAGES = ("torch", "transformers")


class Engine:
    """See the package."""

    version = version

    def __init__(self, checkpoint: str, max_running: int) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
        self._max_running = max_running

    def generate(self, prompts: Sequence[list[int]], outputs: Sequence[int]) -> list[int]:
        counts = []
        for begin in range(0, len(prompts), self._max_running):
            part = slice(begin, begin + self._max_running)
            made = self._generate_padded(prompts[part], max(outputs[part]))
            counts += [min(made, wanted) for wanted in outputs[part]]
        return counts

    @torch.inference_mode()
    def _generate_padded(self, prompts: Sequence[list[int]], tokens: int) -> int:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        settings = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
        out = self._model.generate(ids, attention_mask=mask, **settings)
        return int(out.shape[1]) - longest
