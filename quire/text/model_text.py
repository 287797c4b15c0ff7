"""All that the text side knows about one model, loaded together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.config import Config
from quire.text.chat_template import ChatTemplate, load_chat_template
from quire.text.generation_config import DefaultSampling, default_sampling, eos_ids
from quire.text.tokenizer import Tokenizer, load_tokenizer, read_json


@dataclass(frozen=True)
class ModelText:
    """A model as text.

    Attributes:
        tokenizer: None with --skip-tokenizer-init: work on token ids only.
        chat_template: None when the model has none.
        defaults: Sampling values for what a request leaves open.
        eos_ids: Tokens that end a sequence unless `ignore_eos`.
        tokenizer_settings: What tokenizer_config.json says.
    """

    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | None
    defaults: DefaultSampling
    eos_ids: tuple[int, ...]
    tokenizer_settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def special_tokens(self) -> dict[str, int]:
        """The ids of special tokens by their text."""
        return {} if self.tokenizer is None else self.tokenizer.special_tokens


def load_model_text(config: Config) -> ModelText:
    """Read everything from the model's and the tokenizer's directory.

    Args:
        config: Resolved: `model.model` and `model.tokenizer` are directories.

    Raises:
        SetupError: A file is broken or missing, or a setting cannot be meant.
    """
    directory = Path(config.model.model)
    home = Path(config.model.tokenizer or directory)
    tokenizer = template = None
    if not config.model.skip_tokenizer_init:
        tokenizer = load_tokenizer(home)
        template = load_chat_template(home, config.server.chat_template)
    return ModelText(
        tokenizer=tokenizer,
        chat_template=template,
        defaults=default_sampling(config.model),
        eos_ids=eos_ids(directory, tokenizer.eos_id if tokenizer else None),
        tokenizer_settings=read_json(home / "tokenizer_config.json") if tokenizer else {},
    )
