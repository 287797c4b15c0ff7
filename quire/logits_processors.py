"""Logits processors: classes of the operator's that may change the logits of requests that ask for it.

`--logits-processors package.module:Class` names them; clients can only pass arguments to them (`extra_args`, over HTTP
`vllm_xargs`). A request that a processor takes is planned only when the host knows every token of it, and so loses the
overlap of planning and computing. All other requests pay nothing.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from quire.errors import ConfigError
from quire.sampling_params import SamplingParams

RequestProcessor = Callable[[Sequence[int], Sequence[int], Any], Any]
"""(prompt, output so far, logits) → logits. Both are torch tensors, [vocab] fp32, and the given one may be changed in
place. They are typed Any because the scheduler imports this file, and loads no torch."""


class LogitsProcessor(Protocol):
    """A processor's class. It is built without arguments, once for the scheduler and once for the worker."""

    def for_request(self, sampling: SamplingParams) -> RequestProcessor | None:
        """What changes this request's logits, or None to leave the request alone; always the same answer. It is asked
        again when a request comes back from preemption, so whatever it keeps has to be derived from the output.

        Raises:
            RequestError: `sampling.extra_args` are wrong.
        """
        ...


def load_processors(names: Sequence[str]) -> list[LogitsProcessor]:
    """The processors of these import paths.

    Raises:
        ConfigError: A path is not `module:Class`, or the class cannot be imported or has no `for_request`.
    """
    return [_load(name) for name in names]


def takes(processors: Sequence[LogitsProcessor], sampling: SamplingParams) -> bool:
    """Whether any processor wants a request. One that raises wants it too, and fails the request where that runs."""
    try:
        return any(processor.for_request(sampling) is not None for processor in processors)
    except Exception:
        return True


def import_path(processor: str | type) -> str:
    """The import path of a class.

    Raises:
        ConfigError: It has none, because it was made inside a function.
    """
    if isinstance(processor, str):
        return processor
    if not isinstance(processor, type) or "<locals>" in processor.__qualname__:
        raise ConfigError(
            f"logits_processors: {processor!r} is no class that can be imported: define it at the top of a module.",
            param="logits_processors",
        )
    return f"{processor.__module__}:{processor.__qualname__}"


def _load(name: str) -> LogitsProcessor:
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
        processor: LogitsProcessor = found()
    except Exception as error:
        raise ConfigError(
            f"--logits-processors {name}: {type(error).__name__}: {error}. Give package.module:Class.",
            param="logits_processors",
        ) from error
    if not callable(getattr(processor, "for_request", None)):
        raise ConfigError(
            f"--logits-processors {name}: the class has no method for_request(sampling).", param="logits_processors"
        )
    return processor
