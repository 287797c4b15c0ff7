"""All settings, as frozen plain data: one part in each file, put together as Config.

Flags, their help and `LLM`'s arguments come from these fields, so a field's name is unique over all parts.
`quire.planning.auto_config` makes the automatic choices (`None`, `auto`), and returns a new Config with reasons.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any, get_type_hints

from quire.errors import ConfigError, did_you_mean
from quire.foundation.config.cache import CacheConfig, element_dtype, is_quantized
from quire.foundation.config.lora import LoraConfig
from quire.foundation.config.media import MediaConfig
from quire.foundation.config.model import BUILTIN_MODEL, LoadConfig, ModelConfig
from quire.foundation.config.parallel import DeviceConfig, ParallelConfig
from quire.foundation.config.scheduler import SchedulerConfig
from quire.foundation.config.server import ObservabilityConfig, ServerConfig
from quire.foundation.config.speculation import SpeculationConfig
from quire.foundation.config.values import read_value

__all__ = [
    "BUILTIN_MODEL",
    "CacheConfig",
    "Config",
    "DeviceConfig",
    "LoadConfig",
    "LoraConfig",
    "MediaConfig",
    "ModelConfig",
    "ObservabilityConfig",
    "ParallelConfig",
    "SchedulerConfig",
    "ServerConfig",
    "SpeculationConfig",
]


@dataclass(frozen=True)
class Config:
    """Every setting of one engine and its server."""

    model: ModelConfig = field(default_factory=ModelConfig)
    load: LoadConfig = field(default_factory=LoadConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    media: MediaConfig = field(default_factory=MediaConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    observability: ObservabilityConfig = field(default_factory=ObservabilityConfig)

    @property
    def kv_dtype(self) -> str:
        """The name of the type of the KV cache's elements; --dtype must be resolved."""
        return element_dtype(self.cache.kv_cache_dtype, self.model.dtype)

    @property
    def host_blocks_outlive_engine(self) -> bool:
        """Whether the memory of host blocks is the supervisor's: where one process computes on a CPU, and blocks hold
        nothing but keys and values of the model's type."""
        cache, parallel = self.cache, self.parallel
        is_plain = self.speculation.speculation is None and not is_quantized(cache.kv_cache_dtype)
        is_alone = parallel.ranks == 1 and not parallel.engines_share_experts
        return cache.kv_offloading_size is not None and self.device.device == "cpu" and is_alone and is_plain

    def with_values(self, **values: Any) -> Config:
        """A copy with fields of any part replaced by their flat names, as in `LLM(...)` and flags. Values are checked,
        and may be texts as on the command line. Raises ConfigError if no part has such a name (the closest one is
        suggested), or its field cannot have the value."""
        owner = {f.name: part.name for part in fields(self) for f in fields(getattr(self, part.name))}
        changes: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            if name not in owner:
                hint = did_you_mean(name, owner)
                raise ConfigError(f"'{name}' is not an argument that Quire supports.{hint}", param=name)
            part = getattr(self, owner[name])
            try:
                changes.setdefault(owner[name], {})[name] = read_value(_kinds(part.__class__)[name], value)
            except ValueError as error:
                raise ConfigError(f"{name}: {error}.", param=name) from None
        return replace(self, **{part: replace(getattr(self, part), **c) for part, c in changes.items()})

    def changes(self) -> dict[str, Any]:
        """The values that are not defaults, by their flat names: `with_values` makes this Config of them."""
        parts = [(getattr(self, part.name), getattr(Config(), part.name)) for part in fields(self)]
        return {
            f.name: getattr(own, f.name)
            for own, usual in parts
            for f in fields(own)
            if getattr(own, f.name) != getattr(usual, f.name)
        }


@lru_cache
def _kinds(part: type) -> dict[str, Any]:
    return get_type_hints(part)
