"""--middleware: classes and functions of an operator's own, which see every request first."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from starlette.middleware.base import BaseHTTPMiddleware

from quire.errors import ConfigError


def add_own_middleware(app: FastAPI, paths: Sequence[str]) -> None:
    """Add the middleware of these import paths, the last one outermost.

    Raises:
        ConfigError: A path cannot be imported, or names neither a class nor a coroutine function.
    """
    for path in paths:
        found = _imported(path)
        if inspect.isclass(found):
            app.add_middleware(found)  # type: ignore[arg-type]  # whatever its arguments are: it is given the app alone
        elif inspect.iscoroutinefunction(found):
            app.add_middleware(BaseHTTPMiddleware, dispatch=found)
        else:
            raise _wrong(path, "it is neither a class nor a coroutine function")


def _imported(path: str) -> Any:
    module, _, name = path.replace(":", ".").rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:
        raise _wrong(path, f"{type(error).__name__}: {error}") from error


def _wrong(path: str, why: str) -> ConfigError:
    return ConfigError(f"--middleware {path} cannot be used: {why}. Give package.module.name.", param="middleware")
