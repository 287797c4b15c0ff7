"""`--max-model-len` as it was given: a number, the model's own limit, or `auto` for the longest that fits in memory."""

from __future__ import annotations

from quire.errors import ConfigError
from quire.foundation.config import Config
from quire.models.spec import ModelSpec

AUTO_LENGTH = -1
"""`--max-model-len -1` is `auto`."""


def is_auto(config: Config) -> bool:
    """Whether memory decides how long a sequence may be."""
    return config.model.max_model_len in ("auto", AUTO_LENGTH)


def length_limit(config: Config, spec: ModelSpec) -> int:
    """The number that was given, or else the model's limit."""
    asked = config.model.max_model_len
    return spec.max_model_len if is_auto(config) or not asked else int(asked)


def check_length(config: Config, spec: ModelSpec) -> None:
    """Refuse a length that the model was not made for.

    Raises:
        ConfigError: It is outside of what the model was made for.
    """
    asked = config.model.max_model_len
    if isinstance(asked, int) and not is_auto(config) and not 1 < asked <= spec.max_model_len:
        raise ConfigError(
            f"--max-model-len {asked} is outside 2..{spec.max_model_len}, which is what the model was made for.",
            param="max_model_len",
        )


def length_reason(config: Config, spec: ModelSpec) -> str:
    """Why sequences may be as long as they may."""
    if is_auto(config):
        return f"the longest that fits, of the model's {spec.max_model_len:,}"
    return "the model's limit" if config.model.max_model_len is None else "as asked"
