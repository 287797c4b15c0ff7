"""What `transformers` generates: the reference for tokens and logits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


class Reference:
    """A checkpoint in transformers, fp32, on the CPU."""

    def __init__(self, directory: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    def greedy(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """Greedy tokens, the end-of-sequence token ignored."""
        with self._torch.inference_mode():
            out = self._model.generate(
                self._torch.tensor([list(prompt)]), max_new_tokens=max_tokens, min_new_tokens=max_tokens,
                do_sample=False, eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
        return [int(token) for token in out[0, len(prompt) :]]

    def logits(self, tokens: Sequence[int]) -> list[list[float]]:
        """Logits of every next token after each position."""
        with self._torch.inference_mode():
            rows: list[list[float]] = self._model(self._torch.tensor([list(tokens)])).logits[0].tolist()
        return rows

    def logprobs(self, tokens: Sequence[int]) -> list[list[float]]:
        """Log probabilities of every next token after each position."""
        rows: list[list[float]] = self._torch.tensor(self.logits(tokens)).double().log_softmax(-1).tolist()
        return rows
