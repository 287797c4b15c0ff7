"""`quire route`: the flags of the router, and its log."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from quire.cli.flags import parse
from quire.foundation.config import environment
from quire.foundation.config.router import RouterConfig
from quire.foundation.processes.logs import set_up_logs
from quire.serving.router.router_process import route
from quire.serving.supervisor.announce import log_as_json

DESCRIPTION = "One address in front of several servers: quire route --static-backends http://HOST:PORT,… [flags]."


def run(arguments: Sequence[str]) -> int:
    """Route until the router ends; returns its exit code. Raises SetupError if the router cannot start."""
    config = environment.apply_to_router(parse(RouterConfig, arguments, "quire route", DESCRIPTION))
    set_up_logs(config.log_format, "router", logging.INFO)
    if config.log_format == "json":
        log_as_json()
    return route(config)
