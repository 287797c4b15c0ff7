"""LoRA adapters: what is served beside the base model."""

from __future__ import annotations

from dataclasses import dataclass

from quire.errors import ConfigError

_HIGHEST_RANK = 256


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
        if self.max_loras < 1:
            raise ConfigError("--max-loras must be 1 or more.", param="max_loras")
        if not 1 <= self.max_lora_rank <= _HIGHEST_RANK:
            raise ConfigError(f"--max-lora-rank must be 1 to {_HIGHEST_RANK}.", param="max_lora_rank")
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ConfigError("--max-cpu-loras must be at least --max-loras.", param="max_cpu_loras")

    def check(self) -> None:
        """Refuse what means nothing together.

        Raises:
            ConfigError: See there.
        """
        for name in ("lora_modules", "lora_dir", "lora_pinned"):
            if getattr(self, name) and not self.enable_lora:
                raise ConfigError(f"--{name.replace('_', '-')} needs --enable-lora.", param=name)
        if len(set(self.lora_pinned)) > self.max_loras:
            raise ConfigError("--lora-pinned names more adapters than --max-loras has room for.", param="lora_pinned")

    @property
    def host_adapters(self) -> int:
        """Adapters that are kept in host memory."""
        return self.max_loras if self.max_cpu_loras is None else self.max_cpu_loras
