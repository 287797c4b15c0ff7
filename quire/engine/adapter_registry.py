"""The adapters of an engine by name: those of the start, and those that clients have loaded since.

Loading reads the files, checks them against the model, and says what is in them; nothing else happens if they are
wrong. Knows nothing about slots and requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from quire.config.lora import LoraConfig
from quire.errors import CheckpointError, ConfigError
from quire.executor.executor import AdapterLoader
from quire.messages.to_engine import Adapter, Control
from quire.messages.workers import AdapterLoaded

_POLL_S = 0.001

Answer = Callable[[Control, dict[str, Any] | None, str], None]
"""Answers a command: with a value, or an error's text."""


class AdapterRegistry:
    """Adapters by name.

    Args:
        loader: Reads them.
        adapters: Those of the start.
        answer: See Answer.
    """

    def __init__(self, loader: AdapterLoader, adapters: Sequence[Adapter], answer: Answer) -> None:
        self._loader = loader
        self._by_name = {adapter.name: adapter for adapter in adapters}
        self._answer = answer
        self._loading: list[Control] = []

    @property
    def adapters(self) -> list[Adapter]:
        """All, by the order in which they were loaded."""
        return list(self._by_name.values())

    @property
    def busy(self) -> bool:
        """Whether commands wait for files."""
        return bool(self._loading)

    def receive(self, message: Control) -> None:
        """`load_adapter` of a name and a path, or `unload_adapter` of a name; running requests keep theirs."""
        if message.action == "load_adapter":
            self._loading.append(message)
            self._loader.load(Adapter(message.value["name"], message.value["path"], ""), 0)
        elif self._by_name.pop(message.value["name"], None) is None:
            self._answer(message, None, f"There is no adapter '{message.value['name']}'.")
        else:
            self._answer(message, {}, "")

    def update(self, loaded: Sequence[AdapterLoaded]) -> None:
        """What was read: adapters come in the order in which they were asked for."""
        for each in loaded:
            message = self._loading.pop(0)
            if not each.error:
                self._by_name[each.adapter.name] = each.adapter
            self._answer(message, msgspec.structs.asdict(each.adapter), each.error)


def load_modules(lora: LoraConfig, loader: AdapterLoader | None) -> list[Adapter]:
    """Read the adapters of --lora-modules, before anything is served.

    Raises:
        ConfigError: A name or path is missing, or stands there twice.
        CheckpointError: One does not serve.
    """
    modules = parse_modules(lora.lora_modules)
    if unknown := set(lora.lora_pinned) - {adapter.name for adapter in modules}:
        raise ConfigError(f"--lora-pinned: {min(unknown)} is none of --lora-modules.", param="lora_pinned")
    if not modules:
        return []
    assert loader is not None, "--lora-modules needs --enable-lora"
    for module in modules:
        loader.load(module, 0)
    loaded: list[AdapterLoaded] = []
    while len(loaded) < len(modules):
        loaded += loader.loaded()
        time.sleep(_POLL_S)
    for each in loaded:
        if each.error:
            raise CheckpointError(f"--lora-modules {each.adapter.name}: {each.error}", param="lora_modules")
    return [each.adapter for each in loaded]


def parse_modules(modules: Sequence[str]) -> list[Adapter]:
    """Adapters of --lora-modules, not read yet: `name=path`, or JSON with `name` and `path`.

    Raises:
        ConfigError: See load_modules.
    """
    found: dict[str, Adapter] = {}
    for module in modules:
        name, _, path = module.partition("=")
        if module.lstrip().startswith("{"):
            name, path = _of_json(module)
        if not name or not path:
            raise ConfigError(f"--lora-modules {module}: write name=path, or JSON with both.", param="lora_modules")
        if name in found:
            raise ConfigError(f"--lora-modules names '{name}' twice.", param="lora_modules")
        found[name] = Adapter(name, path, "")
    return list(found.values())


def _of_json(module: str) -> tuple[str, str]:
    try:
        fields = msgspec.json.decode(module, type=dict[str, str | None])
    except msgspec.DecodeError as error:
        raise ConfigError(f"--lora-modules {module}: this is no JSON of name and path ({error}).") from None
    if unknown := fields.keys() - {"name", "path", "base_model_name"}:
        raise ConfigError(f"--lora-modules {module}: '{min(unknown)}' is not a field of it.", param="lora_modules")
    return fields.get("name") or "", fields.get("path") or ""
