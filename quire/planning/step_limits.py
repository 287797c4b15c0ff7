"""The limits of a step: what buffers, warm-up and memory planning are sized for."""

from __future__ import annotations

from dataclasses import dataclass

from quire.errors import ConfigError
from quire.foundation.config import Config


@dataclass(frozen=True)
class StepLimits:
    """The limits that every step keeps.

    Attributes:
        rows: Sequences, each of which may sample a token: `--max-num-seqs`.
        tokens: Of all rows together: `--max-num-batched-tokens`.
        length: Tokens of the longest sequence: `--max-model-len`.
        drafts: Draft tokens of a row, at most.
    """

    rows: int
    tokens: int
    length: int
    drafts: int = 0

    @classmethod
    def of(cls, config: Config) -> StepLimits:
        """The limits that resolved settings set.

        Raises:
            ConfigError: The settings have not been resolved.
        """
        rows, tokens = config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens
        length = config.model.max_model_len
        if not isinstance(length, int) or rows is None or tokens is None:
            raise ConfigError("max_model_len, max_num_seqs and max_num_batched_tokens have not been resolved.")
        speculation = config.speculation.speculation
        return cls(rows, tokens, length, 0 if speculation is None else speculation.tokens)

    @property
    def sampled(self) -> int:
        """Positions that are sampled."""
        return self.rows if not self.drafts else min(self.rows * (1 + self.drafts), self.tokens)

    def fewest_rows(self, tokens: int) -> list[int]:
        """The tokens of each row when `tokens`, or as many as a step may have, are spread over as few rows as possible.

        >>> StepLimits(rows=8, tokens=1000, length=400).fewest_rows(900)
        [400, 400, 100]
        """
        whole, rest = divmod(min(tokens, self.tokens, self.rows * self.length), self.length)
        return [self.length] * whole + [rest] * bool(rest)
