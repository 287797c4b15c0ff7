"""Settings that vLLM's users know and this version does not offer: a closed list.

A neutral value is accepted, with one warning; any other is refused by name. As a setting becomes real its line goes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire.errors import ConfigError

ANY = object()
"""Every value is neutral: the setting cannot matter here."""


@dataclass(frozen=True)
class ForeignSetting:
    """What may be passed without effect, and why it has none or what to do instead."""

    neutral: tuple[Any, ...]
    advice: str

    @property
    def is_flag(self) -> bool:
        """Whether it takes no value on the command line."""
        return any(isinstance(value, bool) for value in self.neutral)


_LATER = "it comes in a later version; leave it out"

FOREIGN: dict[str, ForeignSetting] = {
    "tensor_parallel_size": ForeignSetting((1,), _LATER),
    "pipeline_parallel_size": ForeignSetting((1,), _LATER),
    "data_parallel_size": ForeignSetting((1,), _LATER),
    "enable_expert_parallel": ForeignSetting((False,), _LATER),
    "distributed_executor_backend": ForeignSetting((None, "uni", "mp"), _LATER),
    "gpu_memory_utilization": ForeignSetting(
        (ANY,), "this version runs on the CPU; --kv-cache-memory-bytes sizes the cache"
    ),
    "enforce_eager": ForeignSetting((True, False), "there are no graphs to capture on a CPU"),
    "enable_chunked_prefill": ForeignSetting((True,), "long prompts are always read in chunks"),
    "enable_prefix_caching": ForeignSetting((False,), _LATER),
    "swap_space": ForeignSetting((0,), _LATER),
    "preemption_mode": ForeignSetting((None, "recompute"), _LATER),
    "scheduling_policy": ForeignSetting(("fcfs",), _LATER),
    "cpu_offload_gb": ForeignSetting((0,), _LATER),
    "quantization": ForeignSetting((None,), _LATER),
    "kv_cache_dtype": ForeignSetting(("auto",), _LATER),
    "tokenizer_mode": ForeignSetting(("auto", "hf"), "the tokenizers library reads every tokenizer"),
    "trust_remote_code": ForeignSetting((False,), "code from a model's repository is never run"),
    "enable_lora": ForeignSetting((False,), _LATER),
    "speculative_model": ForeignSetting((None,), _LATER),
    "speculative_config": ForeignSetting((None,), _LATER),
    "num_speculative_tokens": ForeignSetting((None,), _LATER),
    "enable_auto_tool_choice": ForeignSetting((False,), _LATER),
    "tool_call_parser": ForeignSetting((None,), _LATER),
    "reasoning_parser": ForeignSetting((None,), _LATER),
    "disable_log_requests": ForeignSetting((True,), "requests are logged only with --enable-log-requests"),
}


def check_foreign(name: str, value: Any) -> str:
    """The warning for a neutral value of a foreign setting.

    Raises:
        ConfigError: The value would have to mean something.
    """
    setting = FOREIGN[name]
    flag = f"--{name.replace('_', '-')}"
    if any(neutral is ANY or _same(neutral, value) for neutral in setting.neutral):
        return f"{flag} has no effect: {setting.advice}."
    raise ConfigError(f"{flag} {value} is not supported: {setting.advice}.", param=name)


def _same(neutral: Any, value: Any) -> bool:
    return neutral == value or (not isinstance(neutral, bool) and str(neutral) == str(value))
