"""Which parsers a server takes, and that it says so."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from quire.errors import ConfigError
from quire.foundation.config import ServerConfig
from quire.serving.api.chat_parsers import choose_parsers
from quire.text.generation_config import DefaultSampling
from quire.text.model_text import ModelText
from quire.text.template_files import load_chat_template
from quire.text.tokenizer import load_tokenizer
from tests.api.speaker import TEMPLATE
from tests.checkpoints import write_tokenizer


def text(directory: Path, template: str) -> ModelText:
    write_tokenizer(directory)
    return ModelText(load_tokenizer(directory), lambda: load_chat_template(directory, template), DefaultSampling(), ())


def test_the_template_tells_and_the_log_says(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    found = choose_parsers(ServerConfig(), text(tmp_path, TEMPLATE))
    assert (found.tool_parser, found.reasoning_parser) == ("hermes", "qwen3")
    assert "Tool calls: hermes (the chat template has '<tool_call>')" in caplog.text
    assert "Reasoning: qwen3 (the chat template has '<think>')" in caplog.text


def test_flags_go_first(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    server = ServerConfig(tool_call_parser="mistral", reasoning_parser="deepseek_r1")
    found = choose_parsers(server, text(tmp_path, TEMPLATE))
    assert (found.tool_parser, found.reasoning_parser) == ("mistral", "deepseek_r1")
    assert "Tool calls: mistral (--tool-call-parser)" in caplog.text


def test_a_template_may_tell_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    found = choose_parsers(ServerConfig(), text(tmp_path, "{{ messages[0].content }}"))
    assert (found.tool_parser, found.reasoning_parser) == (None, None)
    assert "Tool calls: not read (the chat template does not tell how calls are written)" in caplog.text


@pytest.mark.parametrize("flag", ["tool_call_parser", "reasoning_parser"])
def test_an_unknown_parser_is_a_config_error(tmp_path: Path, flag: str) -> None:
    with pytest.raises(ConfigError, match=f"--{flag.replace('_', '-')}: there is no parser 'nonsense'"):
        choose_parsers(ServerConfig(**{flag: "nonsense"}), text(tmp_path, TEMPLATE))


def test_a_level_that_the_format_of_calls_cannot_keep_is_refused(tmp_path: Path) -> None:
    server = partial(ServerConfig, tool_strict_level="function")
    assert choose_parsers(server(), text(tmp_path, TEMPLATE)).tool_parser == "hermes"
    with pytest.raises(ConfigError, match="--tool-strict-level function: calls in the format 'gemma4'"):
        choose_parsers(server(tool_call_parser="gemma4"), text(tmp_path, TEMPLATE))
