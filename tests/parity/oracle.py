"""What transformers would say next after every token of an answer, also where its keys depend on the length."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from quire.kvcache.keys import KeysByLength
from quire.models.spec import read_spec


class Oracle:
    """A checkpoint in transformers, fp32."""

    def __init__(self, directory: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self._keys: KeysByLength | None = read_spec(directory).keys

    @torch.inference_mode()
    def greedy(self, prompt: list[int], count: int) -> tuple[list[int], Tensor]:
        """What it generates, and the log probabilities [count, vocab] it drew from."""
        self._model(torch.tensor([[5]]))  # a short sequence resets what dynamic frequencies have grown to
        out = self._model.generate(
            torch.tensor([prompt]), max_new_tokens=count, min_new_tokens=count, do_sample=False, eos_token_id=None,
            pad_token_id=0, return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        return out.sequences[0, len(prompt) :].tolist(), torch.cat(out.logits).double().log_softmax(-1)

    @torch.inference_mode()
    def after(self, prompt: list[int], answer: list[int]) -> Tensor:
        """[answer, vocab] log probabilities of each token of the answer, whose own greedy choices it must be.

        One pass over all of it says so. Where keys turn at a length, what comes before is asked in a pass of its own;
        where they grow with it, only generating does.
        """
        tokens = prompt + answer
        if self._keys is not None and self._keys.change == "grow":
            return self.greedy(prompt, len(answer))[1]
        rows = self._rows(tokens)
        if self._keys is not None and self._keys.original < len(tokens):
            rows[: self._keys.original] = self._rows(tokens[: self._keys.original])
        return rows[len(prompt) - 1 : -1]

    def _rows(self, tokens: list[int]) -> Tensor:
        logits: Tensor = self._model(torch.tensor([tokens])).logits[0]
        return logits.double().log_softmax(-1)
