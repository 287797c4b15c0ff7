"""Hints of requests: wishes that a model may be unable to follow, and that are dropped then.

Says which variables of chat templates are hints, and names each one that is dropped in the log once.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

logger = logging.getLogger(__name__)

THINKING_SWITCHES = ("enable_thinking", "thinking")
"""What templates call the variable that switches reasoning on or off."""
TEMPLATE_HINTS = frozenset((
    *THINKING_SWITCHES, "clear_thinking", "low_effort", "preserve_thinking", "reasoning_effort", "thinking_budget",
    "thinking_mode",
))  # fmt: skip
"""Variables about reasoning, which clients send whatever the model is."""
NOT_READ = "this model's chat template does not read it"


class HintLog:
    """Names each hint that is dropped once, so that clients that send it with every request do not fill the log."""

    def __init__(self) -> None:
        self._named: set[str] = set()

    def drop(self, name: str, reason: str) -> None:
        """Note that a hint, by its name in requests, is not followed, and why."""
        if name not in self._named:
            self._named.add(name)
            logger.warning("%s is ignored: %s. This is said once.", name, reason)

    def used(self, variables: Mapping[str, Any], read: Collection[str]) -> dict[str, Any]:
        """A request's variables of the chat template, without hints that the template does not read."""
        unread = [name for name in variables if name in TEMPLATE_HINTS and name not in read]
        for name in unread:
            self.drop(f"chat_template_kwargs.{name}", NOT_READ)
        return {name: value for name, value in variables.items() if name not in unread}
