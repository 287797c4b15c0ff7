"""Calls the modules of a model of transformers without torch's hooks and transformers' checkpointing around them.

A decode step of a small model takes as long in these as in its products.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import nn

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_CHECKPOINTING = "forward_with_checkpointing"
"""What transformers wraps around a layer's forward for training."""


def call_directly(model: nn.Module) -> None:
    """Let all modules of a model be called, and found by the modules that have them, in the shortest way."""
    for module in model.modules():
        for name, child in module.named_children():
            module.__dict__[name] = child  # found before torch looks through parameters, buffers and modules
    for module in model.modules():
        kind: Any = type(module)
        if any(getattr(module, hooks) for hooks in _HOOKS) or kind.__call__ is not nn.Module.__call__:
            continue
        module.__class__ = _replaced(kind) if "forward" in module.__dict__ else _direct(kind)


@cache
def _direct(kind: Any) -> type[nn.Module]:
    """Return the class with its forward as its call."""
    forward: Any = kind.forward
    while forward.__code__.co_name == _CHECKPOINTING:
        forward = forward.__wrapped__
    return type(kind.__name__, (kind,), {"__call__": forward, "__module__": kind.__module__})


@cache
def _replaced(kind: Any) -> type[nn.Module]:
    """Return the class with what has been put into an instance as its forward as its call."""

    def call(self: nn.Module, *args: Any, **given: Any) -> Any:
        return self.__dict__["forward"](*args, **given)

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})
