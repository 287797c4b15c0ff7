"""LoRA adapters that are served beside the base model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from quire.errors import ConfigError
from quire.foundation.config.values import check_range

_HIGHEST_RANK = 256
LONGEST_NAME = 256
"""Maximum characters of an adapter's name."""


@dataclass(frozen=True)
class LoraConfig:
    """LoRA adapters."""

    enable_lora: bool = False
    """Serve LoRA adapters: a request names one as its model."""
    lora_modules: tuple[str, ...] = ()
    """Adapters that are loaded at the start, each as name=path or as JSON with name and path; a path is a directory,
    s3://bucket/key (needs the extra: pip install 'quire[s3]') or a hub id."""
    lora_dir: str | None = None
    """Directory of adapters that are loaded when a request first names one, each in a directory of its name."""
    max_loras: int = 1
    """Adapters that the device holds at once, and so the most of one step; further ones wait for a slot."""
    max_lora_rank: int = 16
    """Largest rank of an adapter, up to 256. Every slot has room for it."""
    max_cpu_loras: int | None = None
    """Adapters that are kept in host memory, beside those of the device; others are read again. Default: as many as
    --max-loras."""
    lora_pinned: tuple[str, ...] = ()
    """Names of --lora-modules that never leave the device."""

    def __post_init__(self) -> None:
        check_range(self, 1, None, "max_loras")
        check_range(self, 1, _HIGHEST_RANK, "max_lora_rank")
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            least = f"at least --max-loras ({self.max_loras})"
            raise ConfigError(f"--max-cpu-loras must be {least}, got {self.max_cpu_loras}.", param="max_cpu_loras")

    @property
    def modules(self) -> dict[str, str]:
        """Paths of --lora-modules by name. Raises ConfigError if a name or path is missing, or a name is repeated."""
        found: dict[str, str] = {}
        for module in self.lora_modules:
            name, _, path = module.partition("=")
            if module.lstrip().startswith("{"):
                name, path = _name_and_path(module)
            if not name or not path:
                raise ConfigError(f"--lora-modules {module}: write name=path, or JSON with both.", param="lora_modules")
            if name in found:
                raise ConfigError(f"--lora-modules names '{name}' twice.", param="lora_modules")
            found[name] = path
        return found

    def check(self, model_names: Sequence[str]) -> None:
        """Raise a ConfigError that names the setting if settings contradict each other, or an adapter has a name of the
        base model."""
        for name in ("lora_modules", "lora_dir", "lora_pinned"):
            if getattr(self, name) and not self.enable_lora:
                raise ConfigError(f"--{name.replace('_', '-')} needs --enable-lora.", param=name)
        if len(set(self.lora_pinned)) > self.max_loras:
            raise ConfigError("--lora-pinned names more adapters than --max-loras has room for.", param="lora_pinned")
        modules = self.modules
        for name in modules:
            if name in model_names:
                raise ConfigError(f"--lora-modules: '{name}' is the base model's name.", param="lora_modules")
            if len(name) > LONGEST_NAME:
                why = f"is longer than {LONGEST_NAME} characters"
                raise ConfigError(f"--lora-modules: '{name[:32]}…' {why}.", param="lora_modules")
        if unknown := set(self.lora_pinned) - modules.keys():
            raise ConfigError(f"--lora-pinned: {min(unknown)} is none of --lora-modules.", param="lora_pinned")

    @property
    def host_adapters(self) -> int:
        return self.max_loras if self.max_cpu_loras is None else self.max_cpu_loras


def _name_and_path(module: str) -> tuple[str, str]:
    try:
        fields = msgspec.json.decode(module, type=dict[str, str | None])
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"--lora-modules {module}: this is no JSON of name and path ({error}).", param="lora_modules"
        ) from None
    if unknown := fields.keys() - {"name", "path", "base_model_name"}:
        raise ConfigError(f"--lora-modules {module}: '{min(unknown)}' is not a field of it.", param="lora_modules")
    return fields.get("name") or "", fields.get("path") or ""
