"""The adapters of an engine by name: those of the start, and those that clients have loaded since.

Loading reads the files and checks them against the model. Knows nothing about slots and requests.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from quire.errors import CheckpointError
from quire.foundation.config.lora import LoraConfig
from quire.foundation.messages.to_engine import Adapter, Control
from quire.foundation.messages.workers import AdapterLoaded, LoadAdapter
from quire.runtime.executor.executor import Orders

_POLL_S = 0.001
_log = logging.getLogger(__name__)

Answer = Callable[[Control, dict[str, Any] | None, str], None]
"""Answers a command: with a value, or an error's text."""


class AdapterRegistry:
    """Adapters by name, first those of the start, which `orders` read."""

    def __init__(self, orders: Orders, adapters: Sequence[Adapter], answer: Answer) -> None:
        self._orders = orders
        self._by_name = {adapter.name: adapter for adapter in adapters}
        self._answer = answer
        self._loading: list[Control] = []

    @property
    def adapters(self) -> list[Adapter]:
        """All adapters, in the order in which they were loaded."""
        return list(self._by_name.values())

    @property
    def busy(self) -> bool:
        """Whether commands wait for files."""
        return bool(self._loading)

    def receive(self, message: Control) -> None:
        """Load or unload an adapter; running requests keep theirs."""
        if message.action == "load_adapter":
            self._loading.append(message)
            self._orders.post(LoadAdapter(Adapter(message.value["name"], message.value["path"], ""), 0))
        elif self._by_name.pop(message.value["name"], None) is None:
            self._answer(message, None, f"There is no adapter '{message.value['name']}'.")
        else:
            self._answer(message, {}, "")

    def update(self, loaded: Sequence[AdapterLoaded]) -> None:
        """Take in adapters that were read, in the order in which they were asked for."""
        for each in loaded:
            message = self._loading.pop(0)
            if not each.error:
                self._by_name[each.adapter.name] = each.adapter
            self._answer(message, msgspec.structs.asdict(each.adapter), each.error)


def load_modules(lora: LoraConfig, orders: Orders, *, is_restart: bool = False) -> list[Adapter]:
    """Read the adapters of --lora-modules, before anything is served.

    Args:
        is_restart: Whether the engine takes another's place. Then it goes on without adapters that cannot be read any
            more: their files may be gone because they were unloaded, and S3 may be out of reach.

    Raises:
        CheckpointError: An adapter cannot be served.
    """
    modules = lora.modules
    if not modules:
        return []
    for name, path in modules.items():
        orders.post(LoadAdapter(Adapter(name, path, ""), 0))
    loaded: list[AdapterLoaded] = []
    while len(loaded) < len(modules):
        loaded += [done for done in orders.done() if isinstance(done, AdapterLoaded)]
        time.sleep(_POLL_S)
    for each in (each for each in loaded if each.error):
        if not is_restart:
            raise CheckpointError(f"--lora-modules {each.adapter.name}: {each.error}", param="lora_modules")
        _log.warning("--lora-modules %s is left out: %s", each.adapter.name, each.error)
    return [each.adapter for each in loaded if not each.error]
