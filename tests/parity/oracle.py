"""What transformers would say next after every token of an answer, also where RoPE depends on the length."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from quire.models.spec import read_spec
from quire.scheduling.kvcache.rope_length_mode import RopeLengthMode


class Oracle:
    """A checkpoint in transformers, by default in fp32 on the CPU."""

    def __init__(self, directory: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
        import transformers

        (name,) = transformers.AutoConfig.from_pretrained(directory).architectures
        kind = getattr(transformers, name, transformers.AutoModelForCausalLM)  # which knows no text models of others
        # Older versions' other implementations leave out the bound of attention scores that some models have.
        model = kind.from_pretrained(directory, dtype=dtype, attn_implementation="eager")
        for module in model.modules():
            if hasattr(module, "limit") and hasattr(model.config, "swiglu_limit"):
                # Older versions' gpt-oss leaves these out of account.
                module.limit, module.alpha = model.config.swiglu_limit, model.config.swiglu_alpha
        self._model = model.eval().to(device)
        self._device = device
        self._length_mode: RopeLengthMode | None = read_spec(directory).rope_length_mode

    @torch.inference_mode()
    def greedy(self, prompt: list[int], count: int) -> tuple[list[int], Tensor]:
        """What it generates, and the log probabilities [count, vocab] it drew from."""
        self._forget()
        out = self._model.generate(
            self._tensor(prompt), max_new_tokens=count, min_new_tokens=count, do_sample=False, eos_token_id=None,
            pad_token_id=0, return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        tokens: list[int] = out.sequences[0, len(prompt) :].tolist()
        return tokens, torch.cat(out.logits).double().log_softmax(-1).cpu()

    def after(self, prompt: list[int], answer: list[int]) -> Tensor:
        """[answer, vocab] log probabilities of each token of the answer."""
        return self.logits_after(prompt, answer).log_softmax(-1)

    @torch.inference_mode()
    def logits_after(self, prompt: list[int], answer: list[int]) -> Tensor:
        """[answer, vocab] float64: what it draws each token of the answer from.

        One pass over all of it says so. With longrope, tokens up to the original length are asked in a pass of
        their own; with dynamic NTK, tokens are asked one by one.
        """
        tokens = prompt + answer
        if self._length_mode is not None and self._length_mode.kind == "dynamic":
            return self._one_by_one(prompt, answer)
        rows = self._rows(tokens)
        if self._length_mode is not None and self._length_mode.original_max_len < len(tokens):
            rows[: self._length_mode.original_max_len] = self._rows(tokens[: self._length_mode.original_max_len])
        return rows[len(prompt) - 1 : -1]

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> Tensor:
        """[tokens, vocab] float64: the logits behind each token, of one pass."""
        return self._rows(tokens)

    def _rows(self, tokens: list[int]) -> Tensor:
        logits: Tensor = self._model(self._tensor(tokens)).logits[0]
        return logits.double().cpu()

    def _one_by_one(self, prompt: list[int], answer: list[int]) -> Tensor:
        self._forget()
        rows, cache = [], None
        for tokens in [prompt, *([token] for token in answer[:-1])]:
            out = self._model(self._tensor(tokens), past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            rows.append(out.logits[0, -1].double().cpu())
        return torch.stack(rows)

    def _forget(self) -> None:
        """A short sequence resets what dynamic frequencies have grown to."""
        self._model(self._tensor([5]))

    def _tensor(self, tokens: list[int]) -> Tensor:
        return torch.tensor([tokens], device=self._device)
