"""What a model directory says about sampling: default values and the tokens that end a sequence.

Reads generation_config.json and the settings that replace it. A request's own value always wins.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import msgspec

from quire.errors import CheckpointError, ConfigError, RequestError
from quire.foundation.config import ModelConfig
from quire.sampling_params import SamplingParams
from quire.text.tokenizer_files import read_json

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DefaultSampling:
    """Values for what a request leaves open, `max_tokens` for chat only; None leaves it to SamplingParams."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None

    def fill(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The sampling values of a request, with open ones (missing or None) filled in, except `max_tokens`."""
        ours = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "max_tokens"}
        asked = {name: value for name, value in given.items() if value is not None}
        return {name: value for name, value in ours.items() if value is not None} | asked

    def limit_chat(self, params: SamplingParams, room: int) -> SamplingParams:
        """Parameters of a chat that names no length: the model's `max_new_tokens`, as far as there is room."""
        if self.max_tokens is None or room < 1:
            return params
        length = max(params.min_tokens, min(self.max_tokens, room))
        return msgspec.structs.replace(params, max_tokens=length)


def default_sampling(config: ModelConfig) -> DefaultSampling:
    """The defaults that a resolved ModelConfig asks for. Raises CheckpointError if the model's generation_config.json
    has values that sampling cannot use, and ConfigError if --override-generation-config has an unknown name or such a
    value, or --generation-config no file."""
    values: dict[str, Any] = {}
    if config.generation_config not in ("quire", "vllm"):
        directory = Path(config.model if config.generation_config == "auto" else config.generation_config)
        file = directory / "generation_config.json"
        if config.generation_config != "auto" and not file.exists():
            raise ConfigError(f"--generation-config: {file} does not exist.", param="generation_config")
        found = read_json(file)
        names = {f.name: f.name for f in fields(DefaultSampling)} | {"max_tokens": "max_new_tokens"}
        values = {ours: found[theirs] for ours, theirs in names.items() if found.get(theirs) is not None}
        _check(values, lambda message: CheckpointError(f"{file}: {message}"))
    overrides = _overrides(config.override_generation_config)
    _check(overrides, lambda message: ConfigError(f"--override-generation-config: {message}"))
    return DefaultSampling(**(values | overrides))


def eos_ids(directory: Path, tokenizer_eos: int | None) -> tuple[int, ...]:
    """Tokens that end a sequence: the model's (generation_config.json, else config.json) and the tokenizer's."""
    config = read_json(directory / "config.json")
    found: list[Any] = []
    for source in (read_json(directory / "generation_config.json"), config, config.get("text_config") or {}):
        entry = source.get("eos_token_id")
        if entry is not None and not found:
            found = entry if isinstance(entry, list) else [entry]
    ids = [*found, tokenizer_eos]
    return tuple(dict.fromkeys(i for i in ids if type(i) is int and i >= 0))


def _overrides(values: Mapping[str, Any]) -> dict[str, Any]:
    known = {f.name for f in fields(DefaultSampling)}
    renamed = {("max_tokens" if name == "max_new_tokens" else name): value for name, value in values.items()}
    for name in renamed:
        if name not in known:
            raise ConfigError(
                f"--override-generation-config: '{name}' is not one of {', '.join(sorted(known))}.",
                param="override_generation_config",
            )
    return renamed


def _check(values: Mapping[str, Any], error: Any) -> None:
    try:
        SamplingParams(**values)
    except RequestError as wrong:
        raise error(wrong.message) from wrong
