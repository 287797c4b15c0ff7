"""The comparison as text and as a picture. Knows nothing about how the figures came about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from workloads import BATCH_OF

from quire.tools.bench.report import Line, Panel, svg

OURS = "quire"
Medians = Mapping[str, Mapping[str, float]]
"""By figure and engine, tokens a second."""


def tables(starts: Mapping[str, Mapping[str, object]], medians: Medians) -> str:
    """Two Markdown tables: medians, and ours by each other engine's."""
    figures = list(medians)
    rows = [
        [
            name,
            *(f"{medians[figure][name]:,.1f}" if name in medians[figure] else "" for figure in figures),
            *(str(start[key]) for key in ("first_token_s", "peak_rss_gb", "version")),
        ]
        for name, start in starts.items()
    ]
    head = ["tok/s", *figures, "first token after, s", "peak RSS, GB", "version"]
    text = _table(head, rows)
    if OURS not in starts or len(starts) == 1:
        return text
    ratios = [[name, *(_ratio(medians[figure], name) for figure in figures)] for name in starts if name != OURS]
    return text + "\n\n" + _table([f"{OURS} by", *figures], ratios)


def picture(shape: str, medians: Medians) -> str:
    """Output by the number of requests, a line an engine; an SVG file's text."""
    points = [(batch, medians[figure]) for figure, batch in BATCH_OF.items() if figure in medians]
    names = list(dict.fromkeys(name for _, found in points for name in found))
    lines = [
        Line(name, [batch for batch, found in points if name in found], [f[name] for _, f in points if name in f])
        for name in names
    ]
    title = f"{shape}: 128 tokens in, 128 out"
    return svg([Panel(title, "requests at once", "output tokens a second", lines)])


def _ratio(by_engine: Mapping[str, float], name: str) -> str:
    return f"{by_engine[OURS] / by_engine[name]:.2f}" if {OURS, name} <= by_engine.keys() else ""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *rows])
