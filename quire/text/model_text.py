"""All that the text side knows about one model, loaded together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.foundation.config import Config
from quire.text.generation_config import DefaultSampling, default_sampling, eos_ids
from quire.text.hints import HintLog
from quire.text.tokenizer import Tokenizer, load_tokenizer
from quire.text.tokenizer_files import read_json

if TYPE_CHECKING:
    from quire.text.chat_template import ChatTemplate


@dataclass(frozen=True)
class ModelText:
    """A model as text.

    Attributes:
        tokenizer: None with --skip-tokenizer-init, for work on token ids only.
        eos_ids: Tokens that end a sequence unless `ignore_eos`.
        tokenizer_settings: Contents of tokenizer_config.json.
        hints: Which hints were dropped because the model cannot follow them.
    """

    tokenizer: Tokenizer | None
    load_chat_template: Callable[[], ChatTemplate | None]
    defaults: DefaultSampling
    eos_ids: tuple[int, ...]
    tokenizer_settings: Mapping[str, Any] = field(default_factory=dict)
    hints: HintLog = field(default_factory=HintLog)

    @cached_property
    def chat_template(self) -> ChatTemplate | None:
        """The model's template; None without one. Loaded when it is first asked for: most scripts never do, and
        jinja and a template take a tenth of a second. Raises CheckpointError or ConfigError if it cannot be used."""
        return self.load_chat_template()

    def other_chat_template(self, source: str) -> ChatTemplate:
        """A template in place of the model's, from jinja text. Raises CheckpointError if it is no template."""
        from quire.text.chat_template import ChatTemplate

        own = self.chat_template
        return ChatTemplate(source) if own is None else own.replaced(source)

    @property
    def special_tokens(self) -> dict[str, int]:
        return {} if self.tokenizer is None else self.tokenizer.special_tokens


def load_model_text(config: Config) -> ModelText:
    """Read everything from the model's and the tokenizer's directory, which resolved settings name. Raises
    SetupError if a file is broken or missing, or a setting makes no sense."""
    directory = Path(config.model.model)
    home = Path(config.model.tokenizer or directory)
    tokenizer = None if config.model.skip_tokenizer_init else load_tokenizer(home, _vocab_size(directory))

    def load_template() -> ChatTemplate | None:
        from quire.text.template_files import load_chat_template

        return load_chat_template(home, config.server.chat_template) if tokenizer else None

    return ModelText(
        tokenizer=tokenizer,
        load_chat_template=load_template,
        defaults=default_sampling(config.model),
        eos_ids=eos_ids(directory, tokenizer.eos_id if tokenizer else None),
        tokenizer_settings=read_json(home / "tokenizer_config.json") if tokenizer else {},
    )


def _vocab_size(directory: Path) -> int | None:
    """The model's vocabulary, if its config.json tells: a tokenizer may have more tokens."""
    config = read_json(directory / "config.json")
    size = config.get("vocab_size", (config.get("text_config") or {}).get("vocab_size"))
    return size if isinstance(size, int) else None
