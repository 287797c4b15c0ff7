"""Writes the table of metrics in docs/metrics.md from the registry: `python docs/metrics_table.py`.

With `--check` it only says whether the table is as it should be.
"""

from __future__ import annotations

import sys
from pathlib import Path

from prometheus_client import Metric

from quire.engine.metrics.gpus import GpuReading
from quire.engine.metrics.prometheus import Exposition
from quire.engine.metrics.server_stats import ServerStats
from quire.engine.metrics.stats import Stats
from quire.foundation.config import CacheConfig
from quire.foundation.messages.from_engine import DiskLoad, Load, MediaLoad, StateLoad, TierLoad

PAGE = Path(__file__).with_name("metrics.md")
BEGIN, END = "<!-- made by docs/metrics_table.py -->\n", "<!-- end -->\n"


def families() -> list[Metric]:
    """Every family that any server shows: as if it had a GPU, states, tiers and images, and had answered a request."""
    engine = Stats()
    tier = TierLoad(0, 0, 0, 0, 0, 0, 0, disk=DiskLoad(0, 0, 0, 0, 0.0, 0.0, 0, 0, 0))
    engine.record_load(Load(states=StateLoad(1, 1, 0, 0), tier=tier, media=MediaLoad(0, 0)))
    stats = ServerStats([engine])
    stats.gpus = [GpuReading(0, "", 0, 0, 0.0, 0.0, 0)]
    stats.http.answered("GET", "/v1/models", 200, 0.0)
    return Exposition(stats, "model", CacheConfig()).families()


def labels_of(family: Metric) -> list[str]:
    """Labels that tell a family's series apart, beside model and engine."""
    if family.name == "vllm:cache_config_info":  # every setting of the cache is one
        return ["…"]
    return sorted({name for sample in family.samples for name in sample.labels} - {"le", "model_name", "engine"})


def table() -> str:
    """The table, a row for each family."""
    rows = ["| name | type | more labels | what it says |", "|---|---|---|---|"]
    for family in families():
        labels = ", ".join(f"`{label}`" for label in labels_of(family))
        rows.append(f"| `{family.name}` | {family.type} | {labels} | {family.documentation} |")
    return "\n".join(rows) + "\n"


def with_table(page: str) -> str:
    """The page, with the table as it should be."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + table() + END + rest.split(END)[1]


def main(arguments: list[str]) -> int:
    """0, or 1 if `--check` found another table."""
    old = PAGE.read_text()
    new = with_table(old)
    if "--check" in arguments:
        return int(old != new)
    PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
