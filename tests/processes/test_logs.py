"""What processes log, and from which level on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from quire.errors import ConfigError
from quire.foundation.processes.logs import apply_log_config

PROGRAM = """
import logging, sys
from quire.foundation.config import Config
from quire.foundation.processes.child_main import _set_up_logs
from quire.foundation.processes.launch import LaunchConfig, RankLaunch
format, rank, file = sys.argv[1], int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else None
own = None if rank < 0 else RankLaunch(
    rank=rank, first=0, here=2, socket_fd=0, ring_fd=0, memory_fd=0, spins=0, patience_s=1.0, ends_with_parent=False
)
_set_up_logs(LaunchConfig(Config().with_values(log_format=format, log_config_file=file), "", rank=own), "engine")
for name in ("quire.runtime.worker", "library"):
    for level in (logging.DEBUG, logging.INFO, logging.WARNING):
        logging.getLogger(name).log(level, "%s %d", name, level)
"""


def said(format: str, rank: int, *file: str) -> list[str]:
    command = [sys.executable, "-c", PROGRAM, format, str(rank), *file]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return done.stderr.splitlines()


@pytest.mark.parametrize(
    ("rank", "expected"),
    [(-1, "quire.runtime.worker 20"), (0, "rank 0: quire.runtime.worker 20"), (1, "rank 1: quire.runtime.worker 30")],
)
def test_a_child_logs_quire_s_messages_from_info_on_and_only_the_first_of_several_ranks(
    rank: int, expected: str
) -> None:
    lines = [line.split(" ", 2)[2] for line in said("text", rank)]
    assert lines[0] == expected
    assert lines[-1].endswith("library 30")
    assert len(lines) == (2 if rank == 1 else 3)


def test_in_json_it_is_the_same() -> None:
    lines = [json.loads(line) for line in said("json", 0)]
    assert [(line["process"], line["level"], line["logger"]) for line in lines] == [
        ("engine 0", "info", "quire.runtime.worker"), ("engine 0", "warning", "quire.runtime.worker"),
        ("engine 0", "warning", "library"),
    ]  # fmt: skip


def test_a_file_configures_the_logs_of_every_process(tmp_path: Path) -> None:
    file = tmp_path / "logs.json"
    handlers = {"own": {"class": "logging.FileHandler", "filename": str(tmp_path / "log"), "formatter": "short"}}
    file.write_text(json.dumps({
        "version": 1, "formatters": {"short": {"format": "%(levelname)s|%(message)s"}}, "handlers": handlers,
        "loggers": {"quire": {"handlers": ["own"], "level": "DEBUG", "propagate": False}},
    }))  # fmt: skip
    others = said("text", -1, str(file))
    assert [line.split(" ", 2)[2] for line in others] == ["library 30"]
    lines = (tmp_path / "log").read_text().splitlines()
    assert lines == [f"{name}|quire.runtime.worker {n}" for name, n in (("DEBUG", 10), ("INFO", 20), ("WARNING", 30))]


@pytest.mark.parametrize("text", [None, "{", "[]", "{}", '{"version": 1, "handlers": {"a": {"class": "no.such"}}}'])
def test_a_file_that_cannot_be_used_is_named(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "logs.json").write_text(text)
    with pytest.raises(ConfigError, match=r"--log-config-file .*logs.json cannot be used: "):
        apply_log_config(str(tmp_path / "logs.json"))
