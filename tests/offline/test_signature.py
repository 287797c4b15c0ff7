"""What editors, type checkers and `help` know of the settings of an engine."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest

import quire
from quire import LLM, AsyncLLM, EngineArgs, LLMEngine
from quire.foundation.config import Config
from quire.offline.engine_settings import AsyncEngineSettings, EngineSettings

ROOT = Path(__file__).parents[2]
READ = [f"quire/{name}.py" for name in ("__init__", *(f"offline/{each}" for each in (
    "async_llm", "engine_settings", "llm", "llm_engine", "signature",
)))]  # fmt: skip
"""What says which settings there are. With all that these import, torch among it, a type checker takes a minute."""
USE = """from quire import LLM, AsyncLLM, LLMEngine
LLM("m", max_model_len="8k", dtype="bfloat16", served_model_name=["a"], disable_log_stats=False)
AsyncLLM("m", disable_log_stats=True, gpu_memory_utilization=0.5)
LLM("m", max_modle_len=5)
LLMEngine("m", kv_cache_dtype="float8")
"""


def test_the_types_of_settings_are_those_of_config() -> None:
    done = subprocess.run([sys.executable, ".ci/settings", "--check"], cwd=ROOT, timeout=240)
    assert done.returncode == 0, "run .ci/settings"


@pytest.mark.parametrize(("kind", "more"), [(LLM, {"disable_log_stats"}), (AsyncLLM, set()), (LLMEngine, set())])
def test_a_signature_shows_every_setting_with_its_default(kind: type, more: set[str]) -> None:
    shown = inspect.signature(kind).parameters
    typed = EngineSettings if kind is LLM else AsyncEngineSettings
    assert shown.keys() == typed.__annotations__.keys() | {"model"} | more
    assert shown["block_size"].default == Config().cache.block_size
    assert "Literal['auto', 'bfloat16'" in str(shown["dtype"])
    assert not {"port", "api_key", "host"} & shown.keys()


def test_every_setting_that_is_shown_is_taken() -> None:
    shown = inspect.signature(LLM).parameters
    named = {name: each.default for name, each in shown.items() if name not in ("model", "disable_log_stats")}
    assert Config().with_values(**named) == Config()
    assert EngineArgs("m", **named).settings == named
    assert get_type_hints(LLM.__init__)  # no name in them is undefined


@pytest.mark.long("api")
def test_a_type_checker_finds_wrong_names_and_values(tmp_path: Path) -> None:
    (tmp_path / "use.py").write_text(USE)
    command = [sys.executable, "-m", "mypy", "--config-file=", f"--cache-dir={tmp_path}", "--follow-imports=skip",
               "--no-error-summary", "--ignore-missing-imports", str(tmp_path / "use.py"), *READ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    said = [line for line in done.stdout.splitlines() if "use.py" in line and "error" in line]
    assert [line.split(":")[1] for line in said] == ["4", "5"], done.stdout + done.stderr
    assert "max_modle_len" in said[0]
    assert "kv_cache_dtype" in said[1]


def test_tab_completion_of_the_package_shows_what_it_exports() -> None:
    assert dir(quire) == sorted(quire.__all__)
    assert all(hasattr(quire, name) for name in dir(quire))
