"""The body of POST /admin/model. Settings have the names of `quire serve`'s flags, which are vLLM's."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from quire.errors import ConfigError
from quire.foundation.config import Config
from quire.foundation.config.cache import KVCacheDtype
from quire.foundation.config.model import ModelDtype
from quire.serving.api.schemas.known_fields import Part, optional

MAX_TIMEOUT_S = 86_400.0
HOLD_TIMEOUT_S = 120.0
OF_ONE_MODEL = (
    "chat_template",
    "generation_config",
    "gguf_file",
    "hf_overrides",
    "lora_modules",
    "lora_pinned",
    "max_model_len",
    "num_gpu_blocks_override",
    "num_speculative_tokens",
    "override_generation_config",
    "quantization",
    "reasoning_parser",
    "revision",
    "speculative_config",
    "speculative_model",
    "tokenizer",
    "tokenizer_revision",
    "tool_call_parser",
)
"""Settings that mean nothing to another model: they fall back to what they are without their flags."""
FIXED = (
    "host",
    "log_config_file",
    "log_format",
    "max_restarts",
    "otlp_traces_endpoint",
    "port",
    "shutdown_timeout",
    "ssl_ca_certs",
    "ssl_cert_reqs",
    "ssl_certfile",
    "ssl_keyfile",
    "uvicorn_log_level",
)
"""Settings of the processes that stay."""
Seconds = Annotated[float, Field(ge=0, le=MAX_TIMEOUT_S)]


class ModelChange(Part):
    """Another model, and how it takes the place of the one that is served."""

    model: str | None = optional(
        "Directory, GGUF file or hub id, as `quire serve` takes it. Default: the present one, read again."
    )
    mode: Literal["auto", "beside", "after"] = Field(
        default="auto", description="Whether it is loaded while the old one serves, or when that one is gone."
    )
    wait: bool = Field(default=False, description="Answer when the swap has ended.")
    drain_timeout: Seconds | None = optional("Seconds for open requests of the old model. Default: --shutdown-timeout.")
    hold_timeout: Seconds = Field(
        default=HOLD_TIMEOUT_S, description="Seconds that new requests wait while no model serves."
    )
    served_model_name: str | list[str] | None = None
    tokenizer: str | None = None
    revision: str | None = None
    gguf_file: str | None = None
    dtype: ModelDtype | None = None
    quantization: str | None = None
    kv_cache_dtype: KVCacheDtype | None = None
    gpu_memory_utilization: float | None = None
    max_model_len: int | Literal["auto"] | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    chat_template: str | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None

    def applied_to(self, asked: Config) -> Config:
        """The settings, as they were asked for, with this change; raises ConfigError if one cannot be meant."""
        own = {"model", "mode", "wait", "drain_timeout", "hold_timeout"}
        values = {name: value for name, value in self if name not in own and value is not None}
        if (names := values.get("served_model_name")) is not None:
            values["served_model_name"] = (names,) if isinstance(names, str) else tuple(names)
        if self.model is not None and self.model != asked.model.model:
            usual = Config()
            asked = asked.with_values(**{name: _setting(usual, name) for name in OF_ONE_MODEL}, model=self.model)
        return asked.with_values(**values)


def check_reloadable(before: Config, now: Config) -> None:
    """Raises ConfigError if a setting differs that only a restart can change."""
    changed = [name for name in FIXED if _setting(before, name) != _setting(now, name)]
    if changed:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in changed)
        raise ConfigError(f"{flags} cannot change while the server runs: restart it, or set it back.", param=changed[0])


def _setting(config: Config, name: str) -> Any:
    return next(getattr(part, name) for part in vars(config).values() if hasattr(part, name))
