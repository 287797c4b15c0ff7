"""Logits processors: classes of the operator's that may change the logits of requests that ask for it.

`--logits-processors package.module:Class` names them; clients can only pass them arguments (`extra_args`, over HTTP
`vllm_xargs`). A request that a processor takes is planned only when every token of it is known to the host, and so
loses the overlap of planning and computing; all other requests pay nothing. Knows nothing about tensors.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from quire.errors import ConfigError
from quire.sampling_params import SamplingParams

RequestProcessor = Callable[[Sequence[int], Sequence[int], Any], Any]
"""(prompt, output so far, logits) → logits. Both are torch tensors, [vocab] fp32; the given one may be changed in
place. Any, because the scheduler reads this file and loads no torch."""


class LogitsProcessor(Protocol):
    """What such a class has; it is built without arguments, once for the scheduler and once for the worker."""

    def for_request(self, sampling: SamplingParams) -> RequestProcessor | None:
        """What changes this request's logits, or None to leave the request alone; the same answer every time. Asked
        again when a request comes back from preemption: what it keeps is lost, so let it derive that from the output.

        Raises:
            RequestError: `sampling.extra_args` are wrong.
        """
        ...


def load_processors(names: Sequence[str]) -> list[LogitsProcessor]:
    """The processors of these import paths.

    Raises:
        ConfigError: One is not `module:Class`, cannot be imported, or has no `for_request`.
    """
    return [_load(name) for name in names]


def takes(processors: Sequence[LogitsProcessor], sampling: SamplingParams) -> bool:
    """Whether any of them wants a request; one that refuses it takes it too, and fails it where it runs."""
    try:
        return any(processor.for_request(sampling) is not None for processor in processors)
    except Exception:
        return True


def import_path(processor: str | type) -> str:
    """The import path of a class.

    Raises:
        ConfigError: It has none, being made inside a function.
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
