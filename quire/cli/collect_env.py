"""`quire collect-env`: what a bug report needs, without secrets."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from quire.cli.flags import parse
from quire.foundation.config import environment
from quire.tools.bench.system_info import system_info, versions

DESCRIPTION = "Show versions, machine and settings for a bug report. Keys and tokens are not shown."
GIB = 2**30


@dataclass(frozen=True)
class CollectOptions:
    """How the facts are written."""

    json: bool = False
    """As JSON."""


def run(arguments: Sequence[str]) -> int:
    """Print the facts; returns the exit code."""
    options = parse(CollectOptions, arguments, "quire collect-env", DESCRIPTION)
    facts = {"versions": versions(), "machine": system_info(), "environment": environment.shown_variables()}
    if options.json:
        print(json.dumps(facts, indent=2))
        return 0
    here = facts["machine"]
    limit = here["memory_limit_bytes"]
    lines = [
        f"system      {here['system']}",
        f"processor   {here['processor']}, {here['cores']} cores: {' '.join(here['processor_flags']) or 'plain'}",
        f"memory      {here['memory_bytes'] / GIB:.1f} GiB" + (f", limited to {limit / GIB:.1f} GiB" if limit else ""),
        *(f"gpu         {', '.join(gpu.values())}" for gpu in here["gpus"] or [{"": "none"}]),
        *(f"link        {cards}: {link}" for cards, link in here["gpu_links"].items()),
        *(f"{name:<20} {version}" for name, version in facts["versions"].items()),
        *(f"{name}={value}" for name, value in facts["environment"].items()),
    ]
    print("\n".join(lines))
    return 0
