"""`quire collect-env`: facts, and no secrets."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import quire
from quire.cli.main import main


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["collect-env", *arguments])
    assert not ended.value.code
    return capsys.readouterr().out


def test_versions_machine_and_settings_without_secrets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("VLLM_API_KEY", "HF_TOKEN", "QUIRE_SECRET_SAUCE"):
        monkeypatch.setenv(name, "hidden")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3")
    monkeypatch.setenv("UNRELATED_THING", "private")
    text = shown(capsys)
    facts = json.loads(shown(capsys, "--json"))
    for name in ("VLLM_API_KEY", "HF_TOKEN", "QUIRE_SECRET_SAUCE"):
        assert f"{name}=(set, not shown)" in text
        assert facts["environment"][name] == "(set, not shown)"
    assert "CUDA_VISIBLE_DEVICES=0,3" in text
    for secret in ("hidden", "private"):
        assert secret not in text + json.dumps(facts)
    assert facts["versions"]["quire"] == quire.__version__
    assert {"python", "torch"} <= facts["versions"].keys()
    assert facts["machine"]["cores"] >= 1
    assert facts["machine"]["memory_bytes"] > 2**20
    assert facts["machine"]["processor"] in text


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    command = [sys.executable, "-m", "quire.cli.main", "collect-env"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
    assert (process.returncode, said) == (141, b"")
