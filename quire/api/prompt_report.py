"""What answers say about prompts: their log probabilities, and for `echo` their text.

Owns vLLM's `prompt_logprobs` and the head of OpenAI's old `logprobs`. Knows nothing about streams or the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from quire.messages import Add, TokenLogprobs
from quire.text.choice import Piece
from quire.text.gathering import prompt_logprobs_by_id
from quire.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class PromptReport:
    """The prompts of one request.

    Attributes:
        adds: Of all choices; `n` in a row share a prompt.
        tokenizer: None when nothing here knows texts.
        show_logprobs: Whether `prompt_logprobs` stands in the answer.
    """

    adds: Sequence[Add]
    tokenizer: Tokenizer | None
    show_logprobs: bool

    def tokens(self, index: int) -> list[int]:
        """The prompt of a choice."""
        add = self.adds[index]
        return add.tokens[: add.prompt_len]

    def text(self, index: int) -> str:
        """The same as text, special tokens included."""
        return self.tokenizer.decode(self.tokens(index), skip_special_tokens=False) if self.tokenizer else ""

    def entries(self, index: int, pieces: Sequence[Piece]) -> list[TokenLogprobs]:
        """The log probabilities of a choice's prompt, from the second token on; the first of the choices that share it
        has them."""
        return pieces[index - index % self.adds[0].sampling.n].prompt_logprobs

    def shown(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        """`prompt_logprobs` of a choice, if they were asked for."""
        if not self.show_logprobs:
            return {}
        rows = prompt_logprobs_by_id(self.tokens(index), self.entries(index, pieces), self.tokenizer)
        return {"prompt_logprobs": msgspec.to_builtins(rows, str_keys=True)}
