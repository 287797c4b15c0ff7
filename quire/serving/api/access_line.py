"""A line of the access log from its fields. Knows nothing about where they come from."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from quire.foundation.processes.logs import FIELDS

logger = logging.getLogger("quire.access")


def write_line(fields: Mapping[str, Any], http_version: str) -> None:
    """Log these fields; `client`, `method`, `path` and `status` are among them."""
    head = f'{fields["client"]} - "{fields["method"]} {fields["path"]} HTTP/{http_version}" {fields["status"]}'
    skipped = ("client", "method", "path", "status")
    rest = " ".join(f"{name}={_text(value)}" for name, value in fields.items() if name not in skipped)
    logger.info("%s %s", head, rest, extra={FIELDS: fields})


def _text(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
