"""The signature that `help(LLM)` and tab completion show: every setting with its type and default."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from quire.foundation.config import Config
from quire.foundation.config.server import LOGS_OF_SERVER, OF_ENGINES_IN_PROCESS

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Function = TypeVar("Function", bound=Callable[..., Any])
LOG_SETTINGS = tuple(LOGS_OF_SERVER)
"""Settings of the server's logs, which engines of `AsyncLLM` and `LLMEngine` take as well."""


def settings_of_engines() -> dict[str, inspect.Parameter]:
    """A keyword argument for each setting of an engine in this process. Every class has `model` by itself."""
    found: dict[str, inspect.Parameter] = {}
    for part in fields(Config):
        own = _parameters(getattr(Config(), part.name))
        is_shown = OF_ENGINES_IN_PROCESS if part.name == "server" else own.keys() - {"model"}
        found |= {name: parameter for name, parameter in own.items() if name in is_shown}
    return found


def shows_settings(*more: str) -> Callable[[Function], Function]:
    """Decorate an `__init__` whose last argument is `**settings`: its signature shows each setting of an engine, and
    those of the server that `more` names."""

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)
        kept = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
        server = _parameters(Config().server)
        shown = [*settings_of_engines().values(), *(server[name] for name in more)]
        function.__signature__ = signature.replace(parameters=[*kept, *shown])  # type: ignore[attr-defined]
        return function

    return decorate


def _parameters(part: DataclassInstance) -> dict[str, inspect.Parameter]:
    kinds = get_type_hints(type(part))
    return {
        each.name: inspect.Parameter(
            each.name, inspect.Parameter.KEYWORD_ONLY, default=getattr(part, each.name), annotation=kinds[each.name]
        )
        for each in fields(part)
    }
