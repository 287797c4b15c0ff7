"""The limits of a step, which buffers, warm-up and memory planning are sized for: `StepLimits.of` alone reads them.

The length is that of `--max-model-len`: a number, the model's own limit, or `auto` for the longest that fits in memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.errors import ConfigError
from quire.foundation.config import Config
from quire.models.spec import ModelSpec

AUTO_LENGTH = -1
"""`--max-model-len -1` is `auto`."""


@dataclass(frozen=True)
class StepLimits:
    """The limits that every step keeps.

    Attributes:
        rows: Sequences, each of which may sample a token: `--max-num-seqs`.
        tokens: Tokens of all rows together: `--max-num-batched-tokens`.
        length: Tokens of the longest sequence: `--max-model-len`.
        drafts: Maximum number of draft tokens of a row.
    """

    rows: int
    tokens: int
    length: int
    drafts: int = 0

    @classmethod
    def of(cls, config: Config, length: int | None = None) -> StepLimits:
        """Return the limits that resolved settings set; `length` is that of the longest sequence, where the settings
        leave it open. Raises ConfigError if the settings have not been resolved."""
        rows, tokens = config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens
        longest = config.model.max_model_len if length is None else length
        if not isinstance(longest, int) or rows is None or tokens is None:
            raise ConfigError("max_model_len, max_num_seqs and max_num_batched_tokens have not been resolved.")
        speculation = config.speculation.speculation
        return cls(rows, tokens, longest, 0 if speculation is None else speculation.tokens)

    @property
    def sampled(self) -> int:
        return self.rows if not self.drafts else min(self.rows * (1 + self.drafts), self.tokens)

    def fewest_rows(self, tokens: int) -> list[int]:
        """The tokens of each row when `tokens`, or as many as a step may have, are spread over as few rows as possible.

        >>> StepLimits(rows=8, tokens=1000, length=400).fewest_rows(900)
        [400, 400, 100]
        """
        whole, rest = divmod(min(tokens, self.tokens, self.rows * self.length), self.length)
        return [self.length] * whole + [rest] * bool(rest)


def is_auto(config: Config) -> bool:
    """Whether memory decides how long a sequence may be."""
    return config.model.max_model_len in ("auto", AUTO_LENGTH)


def length_limit(config: Config, spec: ModelSpec) -> int:
    """The length that was given, or else the model's limit."""
    asked = config.model.max_model_len
    return longest_of(spec) if is_auto(config) or not asked else int(asked)


def longest_of(spec: ModelSpec) -> int:
    """The model's own limit, which files of sentence-transformers may lower if it makes no tokens."""
    limit = None if spec.pooler.generates else spec.pooler.max_len
    return min(spec.max_model_len, limit or spec.max_model_len)


def least_step_tokens(config: Config, spec: ModelSpec) -> int:
    """Return how many tokens a step must have room for: those of the longest text, if texts are computed whole.

    Raises:
        ConfigError: --max-num-batched-tokens has no room for the longest text, or drafts are asked for.
    """
    if not spec.pooler.generates and config.speculation.speculation is not None:
        raise ConfigError(
            "This model makes no tokens, so there are none to draft: leave --speculative-config out.",
            param="speculative_config",
        )
    if not spec.two_sided:
        return 1
    longest, asked = length_limit(config, spec), config.scheduler.max_num_batched_tokens
    if asked is not None and asked < longest:
        raise ConfigError(
            f"--max-num-batched-tokens {asked} is less than --max-model-len {longest}, and this model computes each "
            f"text whole, in one step: raise the first to {longest}, or lower the second to {asked}.",
            param="max_num_batched_tokens",
        )
    return longest


def check_length(config: Config, spec: ModelSpec) -> None:
    """Raise a ConfigError for a length that the model was not made for."""
    asked = config.model.max_model_len
    if isinstance(asked, int) and not is_auto(config) and not 1 < asked <= spec.max_model_len:
        raise ConfigError(
            f"--max-model-len {asked} is outside 2..{spec.max_model_len}, which is "
            f"{_LIMITED.format(spec.length_limit) if spec.length_limit else 'what the model was made for'}.",
            param="max_model_len",
        )


_LIMITED = "what is served of this model: up to {}"


def length_reason(config: Config, spec: ModelSpec) -> str:
    """Why sequences may be as long as they may."""
    if is_auto(config):
        return f"the longest that fits, of the model's {spec.max_model_len:,}"
    if config.model.max_model_len is not None:
        return "as asked"
    return _LIMITED.format(spec.length_limit) if spec.length_limit else "the model's limit"
