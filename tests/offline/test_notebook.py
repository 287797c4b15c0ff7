"""In a notebook, a start is reported in a line, and a call shows its progress as text: no widgets are needed."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from quire import LLM, SamplingParams
from quire.foundation.processes.notebook import is_notebook
from quire.models.weights.progress import ReadingProgress
from tests.checkpoints import make_llama
from tests.weights.test_progress import Ticks


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama") / "model")


def run_in(shell: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))  # type: ignore[arg-type]


def test_a_notebook_shows_the_start_and_the_progress_of_a_call(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_in(SimpleNamespace(kernel=object()), monkeypatch)
    with LLM(str(directory), skip_tokenizer_init=True, max_model_len=64) as llm:
        said = capsys.readouterr()
        assert re.fullmatch(
            rf"Quire \S+: {directory} in \w+ on cpu, ready in \d+\.\d s. Sequences of up to 64 tokens; the KV cache "
            r"holds [\d,]+\.\n", said.err)  # fmt: skip
        llm.generate([[5], [6], [7]], SamplingParams(max_tokens=2))
        lines = capsys.readouterr().err.split("\r")
        assert re.match(r"Generating \| +\| 0/3 in \d+\.\d s", lines[1])
        assert re.match(r"Generating \|█+\| 3/3 in \d+\.\d s, [\d,]+ tokens/s *\n$", lines[-1])
        llm.generate([[5]], SamplingParams(max_tokens=2), use_tqdm=False)
        assert capsys.readouterr() == ("", "")


def test_reading_weights_shows_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_in(SimpleNamespace(kernel=object()), monkeypatch)
    with ReadingProgress(4_000_000_000, Ticks(0.6), visible=True) as progress:
        progress.advance(1_000_000_000)
    assert capsys.readouterr().err.startswith("\rReading weights: 1.00/4.00 GB, ")


@pytest.mark.parametrize("shell", [None, SimpleNamespace()], ids=["a program", "IPython on a terminal"])
def test_elsewhere_nothing_is_shown(
    shell: object, directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_in(shell, monkeypatch)
    assert not is_notebook()
    with LLM(str(directory), skip_tokenizer_init=True, max_model_len=64) as llm:
        llm.generate([[5]], SamplingParams(max_tokens=2))
    assert capsys.readouterr().err == ""
