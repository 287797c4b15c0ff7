"""Calls a causal language model of transformers in two halves: the decoder, and the head with all that it does to
logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from quire.models.fallback.classes import arguments_of, base_of


class _Given:
    """An output of the decoder that has hidden states only; whatever else a head may look for is None."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return (self.last_hidden_state,)[place]
        return self.last_hidden_state if place in (0, "last_hidden_state") else None


class Halves:
    """A model in two halves, of one sequence [1, tokens] each.

    The head is the model's own forward around a decoder that returns given hidden states: so a scale, a bound or a bias
    of logits stays as the model has it.

    Args:
        model: The model, on any device.
        is_separate: Whether the head can be computed alone. Otherwise hidden states are the logits.

    Attributes:
        accepts: Names of the arguments that the decoder takes.
    """

    def __init__(self, model: PreTrainedModel, is_separate: bool = True) -> None:
        base = base_of(model)
        self.is_separate = is_separate and base is not None
        self.decoder: torch.nn.Module = base if self.is_separate and base is not None else model
        self.accepts = arguments_of(self.decoder)
        self._model = model
        self._given: _Given | None = None
        self._was_given = False
        if self.is_separate:
            assert base is not None
            self._forward = self.decoder.forward
            self.decoder.__dict__["forward"] = self._forward_or_given

    def hidden(self, tokens: Tensor, **inputs: Any) -> tuple[Tensor, Any]:
        """Compute hidden states: tokens [tokens], or their embeddings [tokens, width] → [tokens, hidden], and the
        decoder's whole output."""
        name = "inputs_embeds" if tokens.is_floating_point() else "input_ids"
        output = self.decoder(**{name: tokens[None]}, **inputs)
        hidden = output[0] if self.is_separate else output.logits
        return hidden[0], output

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits: hidden states [n, hidden] → [n, vocabulary]."""
        if not self.is_separate:
            return hidden
        self._given = _Given(hidden[None])
        try:
            tokens = torch.zeros((1, len(hidden)), dtype=torch.int64, device=hidden.device)
            logits: Tensor = self._model(input_ids=tokens).logits
        finally:
            self._given = None
        return logits[0]

    def finds_head(self, width: int) -> bool:
        """Whether the head computes logits from hidden states of this width and from nothing else."""
        if not self.is_separate:
            return False
        self._was_given = False
        try:
            with torch.inference_mode():
                logits = self.logits(torch.empty((3, width), device=self._model.device))
        except Exception:  # whatever it looks for in vain
            return False
        return self._was_given and logits.dim() == 2 and len(logits) == 3

    def restore(self) -> None:
        """Give the decoder its own forward back."""
        self.decoder.__dict__.pop("forward", None)

    def _forward_or_given(self, *args: Any, **inputs: Any) -> Any:
        if self._given is None:
            return self._forward(*args, **inputs)
        self._was_given = True
        return self._given
