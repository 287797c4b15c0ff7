"""What vLLM users type: every flag is served, accepted without effect, or refused with what to do."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from docs import migration_tables
from quire import LLM
from quire.cli.flags import parse_config
from quire.cli.settings_fields import settings_of
from quire.errors import ConfigError
from quire.foundation.config import Config
from quire.foundation.config.vllm_checks import check_vllm_setting, meant_value
from quire.foundation.config.vllm_compat import VLLM_ALIASES, VLLM_REFUSED_VALUES, VLLM_SETTINGS, VLLM_VALUES
from tests.checkpoints import make_llama

SETTINGS = {setting.name for setting in settings_of(Config)}
NEUTRAL = """
--trust-remote-code | code from a model's repository is never run
--no-enable-chunked-prefill | long prompts are always read in chunks
--enable-chunked-prefill | long prompts are always read in chunks
--num-scheduler-steps 8 | steps are always scheduled asynchronously
--async-scheduling | steps are always scheduled asynchronously
--disable-log-requests | requests are logged only with --enable-log-requests
--decode_context_parallel_size=1 | this version has
--lora-dtype auto | adapters are of --dtype
--all2all-backend allgather_reducescatter | ranks gather the rows of all engines
-O3 | kernels are chosen
-O 2 | kernels are chosen
-O.mode=3 | kernels are chosen
-O{"level":3} | kernels are chosen
-cc.cudagraph_mode=FULL | kernels are chosen
--compilation-config {"mode":3} | kernels are chosen
--compilation-config.mode 3 | kernels are chosen
--cudagraph-capture-sizes 1 2 4 | kernels are chosen
--attention-backend FLASH_ATTN | kernels are chosen
--max-num-partial-prefills 4 | as many prompts are read at once
--ignore-patterns a b | only files that are read are downloaded
--code-revision main | code from a model's repository is never run
--structured-outputs-config {"backend":"xgrammar"} | whitespace options
--kv-transfer-config={} | no cache leaves the server
--cpu-offload-gb 0 | weights stay in memory
--collect-detailed-traces model worker | traces of --otlp-traces-endpoint
--model-loader-extra-config {"a":1} | read by threads
--no-async-scheduling | steps are always scheduled asynchronously
"""
REFUSED = """
--decode-context-parallel-size 4 | --tensor-, --pipeline- and --data-parallel-size
--fully-sharded-loras | adapters are of --dtype
--structured-outputs-config {"disable_any_whitespace":true} | send whitespace options with the request
--cpu-offload-gb 4 | --quantization fp8, or ranks on more cards, make room
--kv-transfer-config {"kv_connector":"X"} | --kv-offloading-size keeps KV blocks
--enable-sleep-mode | weights stay in memory
--task embed | give --runner and --convert in its place
--rope-scaling {"rope_type":"yarn"} | write it into --hf-overrides
--load-format pt | convert the checkpoint to safetensors
--enable-log-outputs | answers are never logged
"""


def lines(table: str) -> list[tuple[list[str], str]]:
    rows = [line.split(" | ") for line in table.strip().splitlines()]
    return [(words.split(" "), said) for words, said in rows]


def config(*arguments: str) -> Config:
    return parse_config(arguments, "quire serve", "")


@pytest.mark.parametrize(("arguments", "said"), lines(NEUTRAL), ids=lambda value: value[0])
def test_a_neutral_value_is_accepted_with_one_warning(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    for before, after in (([], ["--model", "m"]), (["m"], ["--port", "1"])):
        assert config(*before, *arguments, *after).model.model == "m"
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("quire: warning: --")
        assert "has no effect" in line
        assert said in line


@pytest.mark.parametrize(("arguments", "said"), lines(REFUSED), ids=lambda value: value[0])
def test_what_would_have_to_mean_something_is_refused_with_what_to_do(arguments: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config("m", *arguments)
    assert caught.value.message.startswith(f"{' '.join(arguments)} is not supported: ")
    assert said in caught.value.message


def test_values_of_vllm_s_may_have_another_name_here() -> None:
    for name, values in VLLM_VALUES.items():
        flag = f"--{name.replace('_', '-')}"
        for theirs, ours in values.items():
            assert config("m", flag, theirs) == config(f"{flag}={theirs}", "m") == config("m", flag, ours)
            assert meant_value(name, theirs) == ours
        for theirs in VLLM_REFUSED_VALUES[name]:
            with pytest.raises(ConfigError, match="is not supported"):
                config("m", flag, theirs)


def test_no_foreign_setting_is_a_real_one() -> None:
    assert VLLM_SETTINGS.keys() & SETTINGS == set()
    assert set(VLLM_ALIASES.values()) <= VLLM_SETTINGS.keys() | SETTINGS


@pytest.mark.parametrize("name", VLLM_SETTINGS)
def test_none_and_the_neutral_values_ask_for_nothing(name: str) -> None:
    for value in (None, {}, [], *(each for each in VLLM_SETTINGS[name].neutral if not callable(each))):
        assert "has no effect" in check_vllm_setting(name, value)
    if VLLM_SETTINGS[name].is_flag:
        assert all(isinstance(value, bool) for value in VLLM_SETTINGS[name].neutral)


def test_a_true_is_not_a_one() -> None:
    with pytest.raises(ConfigError):
        check_vllm_setting("decode_context_parallel_size", True)


def test_arguments_of_llm_are_treated_alike(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    asked: dict[str, Any] = {
        "trust_remote_code": True, "compilation_config": 0, "limit_mm_per_prompt": {"image": 0},
        "hf_overrides": {}, "tokenizer_revision": None,
        "enable_chunked_prefill": False, "load_format": "hf",
    }  # fmt: skip
    with caplog.at_level(logging.WARNING), LLM(str(make_llama(tmp_path / "model")), skip_tokenizer_init=True, **asked):
        pass
    said = [record.getMessage() for record in caplog.records if "has no effect" in record.getMessage()]
    assert [line.split()[0] for line in said] == sorted(asked.keys() & VLLM_SETTINGS.keys())
    with pytest.raises(ConfigError, match=r"^cpu_offload_gb 4 is not supported: weights stay in memory"):
        LLM("m", cpu_offload_gb=4)  # type: ignore[call-arg]


def test_every_flag_of_vllm_is_known() -> None:
    known = SETTINGS | VLLM_SETTINGS.keys()
    assert [flag for flag in migration_tables.flags() if flag.replace("-", "_") not in known] == []


def test_the_page_about_migrating_is_current() -> None:
    assert migration_tables.main(["--check"]) == 0, "run python docs/migration_tables.py"
