"""Values of settings: Python's are taken as the command line takes their text, or refused with the same words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire import LLM, AsyncLLM, LLMEngine
from quire.cli.flags import parse_config
from quire.cli.settings_fields import settings_of
from quire.errors import ConfigError
from quire.foundation.config import Config
from quire.foundation.config.values import without_none

SETTINGS = {setting.name: setting for setting in settings_of(Config)}
TEXTS = (
    "banana", "", "-1", "-5", "0", "1", "3.5", "4k", "8K", "true", "no", "null", "17", "nan", "inf", "1e400", "auto",
    '{"a": 1}', '["a"]', "[1]", "[", "9" * 30, "70000",
)  # fmt: skip
OTHERS: tuple[Any, ...] = (
    object(), b"x", 17, -5, 3.5, 2.0, float("nan"), True, False, [], ["x"], [1], (), {}, {"a": 1}, {1: 2}, {"x"},
    10**30, 1e400, None,
)  # fmt: skip


def flag(name: str, text: str) -> str:
    return f"--{name.replace('_', '-')}={text}"


def from_value(name: str, value: Any) -> Config | str:
    try:
        return Config().with_values(**{name: value})
    except ConfigError as error:
        return error.message


def one_of_each_kind() -> list[tuple[str, str]]:
    """A setting of each type, and one of each range, with a text that it refuses."""
    found: dict[str, tuple[str, str]] = {}
    for name, setting in SETTINGS.items():
        for text in TEXTS:
            said = from_value(name, text)
            if isinstance(said, str):
                found.setdefault(f"{setting.kind} {said[:2] == '--'}", (name, text))
    return list(found.values())


@pytest.mark.parametrize("text", TEXTS)
def test_the_command_line_takes_what_llm_takes(text: str) -> None:
    takers = [name for name in SETTINGS if isinstance(from_value(name, text), Config)]
    expected = Config().with_values(**dict.fromkeys(takers, text))
    assert parse_config([flag(name, text) for name in takers], "quire serve", "") == expected


@pytest.mark.parametrize(("name", "text"), one_of_each_kind())
def test_the_command_line_refuses_what_llm_refuses_in_the_same_words(name: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config([flag(name, text)], "quire serve", "")
    assert caught.value.message.replace(f"{flag(name, '')[:-1]}:", f"{name}:") == from_value(name, text)


@pytest.mark.parametrize("name", SETTINGS)
def test_every_other_value_is_of_the_field_s_type_or_refused_by_name(name: str) -> None:
    kind = SETTINGS[name].kind
    refused = 0
    for value in OTHERS:
        found = from_value(name, value)
        if isinstance(found, str):
            refused += 1
            assert name in found.replace("-", "_"), found
        else:
            held = getattr(getattr(found, SETTINGS[name].group), name)
            assert held is None or from_value(name, held) == found
            assert held is not None or kind is not without_none(kind)
    assert refused >= 8


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"dtype": "banana"}, "dtype: 'banana' is not one of auto, "),
        (
            {"load_format": "banana"},
            "load_format: 'banana' is not one of auto, safetensors, gguf, ",
        ),
        ({"block_size": 17}, "block_size: 17 is not one of 8, 16, 32, 64, 128."),
        ({"device": "tpu"}, "device: 'tpu' is not one of auto, cuda, cpu."),
        ({"performance_mode": "fast"}, "performance_mode: 'fast' is not one of balanced, interactivity, throughput."),
        ({"scheduling_policy": "lifo"}, "scheduling_policy: 'lifo' is not one of fcfs, priority."),
        ({"preemption_mode": "drop"}, "preemption_mode: 'drop' is not one of recompute, swap."),
        ({"seed": "x"}, "seed: 'x' is not a whole number."),
        ({"enable_prefix_caching": "no"}, "enable_prefix_caching: 'no' is neither true nor false."),
        ({"gpu_memory_utilization": "much"}, "gpu_memory_utilization: 'much' is not a number."),
        ({"served_model_name": 5}, "served_model_name: 5 is not a list of strings."),
        ({"tokenizer": 5}, "tokenizer: 5 is not a string."),
        ({"speculative_config": "ngram"}, "speculative_config: 'ngram' is not JSON"),
        ({"logits_processors": 5}, "logits_processors: 5 is not a list of strings."),
        ({"cpu_threads": 0}, "--cpu-threads must be 1 or more, got 0."),
        ({"max_num_seqs": "-4"}, "--max-num-seqs must be at least 1, got -4."),
        ({"port": 8000}, "port is of a server alone (quire serve --port): leave it out."),
        ({"host": "0.0.0.0"}, "host is of a server alone"),
        ({"api_key": "secret"}, "api_key is of a server alone"),
        ({"max_modle_len": 5}, "Did you mean 'max_model_len'?"),
        ({"model": 5}, "model: 5 is not a string."),
    ],
    ids=lambda value: str(value)[:40],
)
@pytest.mark.parametrize("engine", [LLM, AsyncLLM, LLMEngine])
def test_engines_in_process_refuse_what_cannot_be_meant(engine: Any, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        engine(**settings)
    assert said in caught.value.message


def test_values_are_taken_as_the_command_line_reads_them(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    config = Config().with_values(
        max_model_len="8k", max_num_seqs="4", gpu_memory_utilization=1, enforce_eager="true", served_model_name="m",
        block_size="32", swap_space="0.5", model=tmp_path, dtype=torch.bfloat16, num_gpu_blocks_override=64.0,
    )  # fmt: skip
    assert config.model.max_model_len == 8000
    assert config.scheduler.max_num_seqs == 4
    assert config.cache.gpu_memory_utilization == 1.0
    assert config.device.enforce_eager is True
    assert config.model.served_model_name == ("m",)
    assert (config.cache.block_size, config.cache.swap_space, config.cache.num_gpu_blocks_override) == (32, 0.5, 64)
    assert (config.model.model, config.model.dtype) == (str(tmp_path), "bfloat16")
    with pytest.raises(ConfigError, match=r"dtype: torch\.int8 is not one of"):
        Config().with_values(dtype=torch.int8)


def test_a_boolean_flag_takes_true_or_false_behind_an_equals_sign() -> None:
    def eager(*arguments: str) -> bool:
        return parse_config(arguments, "quire serve", "").device.enforce_eager

    assert eager("--enforce-eager=true")
    assert not eager("--enforce-eager=False")
    for arguments, said in (
        (["--enforce-eager=no"], "--enforce-eager: 'no' is neither true nor false."),
        (["--no-enforce-eager=false"], "--no-enforce-eager takes no value, got 'false'."),
    ):
        with pytest.raises(ConfigError) as caught:
            eager(*arguments)
        assert caught.value.message == said
