"""What the text side knows about a model, and when it is loaded."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from quire import builtin
from quire.errors import CheckpointError
from quire.foundation.config import Config
from quire.text.model_text import ModelText, load_model_text


def _text(directory: Path, template: str) -> ModelText:
    shutil.copytree(builtin.path("quill"), directory, dirs_exist_ok=True)
    (directory / "chat_template.jinja").write_text(template)
    return load_model_text(Config().with_values(model=str(directory)))


def test_a_broken_chat_template_is_told_to_whoever_asks_for_it(tmp_path: Path) -> None:
    text = _text(tmp_path, "{% for message in messages %}")
    assert text.tokenizer is not None
    for _ in range(2):
        with pytest.raises(CheckpointError, match="chat template cannot be compiled"):
            _ = text.chat_template


def test_a_chat_template_is_compiled_once(tmp_path: Path) -> None:
    text = _text(tmp_path, "{{ messages[0].content }}{{ eos_token }}")
    assert text.chat_template is text.chat_template
    own, other = text.chat_template, text.other_chat_template("{{ eos_token }}")
    assert own is not None
    assert own.render([{"role": "user", "content": "a"}]) == "a" + other.render([{"role": "user", "content": "a"}]), (
        "with the model's special tokens"
    )


def test_a_script_that_only_generates_imports_no_jinja() -> None:
    code = "import sys; from quire.offline.llm import LLM; assert 'jinja2' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
