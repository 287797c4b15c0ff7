"""Whether a value of one of vLLM's settings asks for something that Quire does not have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from quire.errors import ConfigError
from quire.foundation.config.vllm_compat import ANY, VLLM_REFUSED_VALUES, VLLM_SETTINGS, VLLM_VALUES, VllmSetting


def check_vllm_setting(name: str, value: Any, shown_name: str | None = None) -> str:
    """The warning about a neutral value of such a setting, which is called by its flag or as `shown_name`. Raises
    ConfigError if the value asks for something."""
    setting = VLLM_SETTINGS[name]
    shown_name = shown_name or f"--{name.replace('_', '-')}"
    if _is_neutral(setting, value):
        return f"{shown_name} has no effect: {setting.advice.removesuffix('; leave it out')}."
    shown = "" if value is True else f" {value}"
    raise ConfigError(f"{shown_name}{shown} is not supported: {setting.advice}.", param=name)


def meant_value(name: str, value: Any) -> Any:
    """The value that Quire has for one of vLLM's. Raises ConfigError for one that is not served."""
    if isinstance(value, str) and (advice := VLLM_REFUSED_VALUES.get(name, {}).get(value)) is not None:
        raise ConfigError(f"--{name.replace('_', '-')} {value} is not supported: {advice}.", param=name)
    return VLLM_VALUES.get(name, {}).get(value, value) if isinstance(value, str) else value


def _is_neutral(setting: VllmSetting, value: Any) -> bool:
    value = _decoded(value)
    if value is None or (isinstance(value, str | Mapping | list | tuple) and not value):
        return True
    return any(neutral is ANY or _asks_nothing(neutral, value) for neutral in setting.neutral)


def _asks_nothing(neutral: Any, value: Any) -> bool:
    return bool(neutral(value)) if callable(neutral) else _same(neutral, value)


def _decoded(value: Any) -> Any:
    """A value that may be JSON or a list on the command line."""
    if isinstance(value, list) and len(value) == 1:
        return _decoded(value[0])
    if isinstance(value, str) and value[:1] in ("{", "["):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def _same(neutral: Any, value: Any) -> bool:
    if isinstance(neutral, bool) or isinstance(value, bool):
        return neutral is value
    return neutral == value or str(neutral) == str(value)
