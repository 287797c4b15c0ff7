"""How a process logs to standard error: lines for people, or a JSON object a line."""

from __future__ import annotations

import logging
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import msgspec

from quire.errors import ConfigError

LogFormat = Literal["text", "json"]
FIELDS = "fields"
"""Key in a log record's `extra` for a dict, whose items become fields of its JSON object."""


class JsonFormatter(logging.Formatter):
    """A record as a JSON object: time (UTC), level, process, pid, logger, message, and the record's own fields.

    `process` is what this process is: `supervisor`, `api`, `engine`.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "pid": os.getpid(),
            "logger": record.name,
            "message": " ".join(record.getMessage().split()),
            **getattr(record, FIELDS, {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


def apply_log_config(path: str) -> None:
    """Configure logging by a JSON file of --log-config-file. Raises ConfigError if it cannot be used."""
    try:
        values = msgspec.json.decode(Path(path).read_bytes(), type=dict[str, Any])
        from logging.config import dictConfig  # few servers have such a file

        dictConfig({"disable_existing_loggers": False, **values})
    except (OSError, msgspec.DecodeError, ValueError, TypeError, AttributeError, ImportError) as error:
        why = f"{error} ({error.__cause__})" if error.__cause__ else error
        raise ConfigError(f"--log-config-file {path} cannot be used: {why}.", param="log_config_file") from error


def set_up_logs(
    format: LogFormat, process: str, level: int = logging.WARNING, prefix: str = "", own_level: int = logging.INFO,
    config_file: str | None = None,
) -> None:  # fmt: skip
    """Log to standard error from now on; a process may call this again. Libraries' messages are shown from `level` on,
    Quire's own from `own_level` on. `prefix` stands before messages that are text, to tell processes apart. What a
    `config_file` says comes last."""
    handler = logging.StreamHandler()
    if format == "json":
        handler.setFormatter(JsonFormatter(process))
        logging.captureWarnings(True)
    else:
        handler.setFormatter(logging.Formatter(f"%(levelname)s %(asctime)s {prefix}%(message)s", datefmt="%H:%M:%S"))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level)
    logging.getLogger("quire").setLevel(own_level)
    if config_file is not None:
        apply_log_config(config_file)
