"""How a process logs: lines for people, or a JSON object a line.

Owns the format and where it is set up. Everything goes to standard error. Knows nothing about what is logged.
"""

from __future__ import annotations

import logging
import os
from datetime import UTC, datetime
from typing import Literal

import msgspec

LogFormat = Literal["text", "json"]
FIELDS = "fields"
"""Of a log record (`extra={FIELDS: {...}}`): what becomes fields of its JSON object."""


class JsonFormatter(logging.Formatter):
    """A record as a JSON object: time (UTC), level, process, pid, logger, message, and the record's own fields.

    Args:
        process: What this process is: `supervisor`, `api`, `engine`.
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


def set_up_logs(
    format: LogFormat,
    process: str,
    level: int = logging.WARNING,
    prefix: str = "",
    own_level: int = logging.INFO,
) -> None:
    """Log to standard error from now on; a process may call it again.

    Args:
        format: In which form.
        process: What this process is called in JSON.
        level: From which on messages of libraries are shown.
        prefix: Before each message that is text: tells which of several processes says it.
        own_level: From which on Quire's own messages are shown.
    """
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
