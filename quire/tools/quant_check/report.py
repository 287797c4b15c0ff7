"""Findings for people, for programs and as a picture."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from quire.tools.bench.report import Line, Panel, measured_with, svg, table, write_json, write_text
from quire.tools.quant_check.findings import Findings, LayerFinding, verdict
from quire.tools.quant_check.options import CheckOptions

SHOWN_LAYERS = 8
_BLOCK = re.compile(r"\.(\d+)(?:\.|$)")


def publish(options: CheckOptions, found: Findings, missed: Sequence[str]) -> None:
    """Print the findings, and write the files that were asked for. Raises ConfigError if a file cannot be written."""
    print(as_text(options, found, missed))
    if options.json is not None:
        write_json(options.json, measured_with(options) | as_json(options, found, missed))
    if options.picture is not None:
        write_text(options.picture, picture(found))


def as_text(options: CheckOptions, found: Findings, missed: Sequence[str]) -> str:
    figures, scores = found.divergence, found.scores
    rows = [
        ("Texts, tokens compared", f"{found.texts}, {figures.tokens:,}"),
        ("KL divergence a token (nats), mean", f"{figures.mean_kl:.5f} ± {figures.standard_error:.5f}"),
        ("  median", f"{figures.median_kl:.5f}"),
        ("  99th percentile, largest", f"{figures.p99_kl:.4f}, {figures.max_kl:.4f}"),
        ("Top-1 agreement", f"{100 * figures.top1_agreement:.2f} %"),
        ("Perplexity of base and quantized", f"{figures.base_perplexity:.4f}, {figures.perplexity:.4f}"),
    ]
    if scores:
        rows.append((f"Right of {scores.questions} questions", f"{scores.base:.1f} %, {scores.quantized:.1f} %"))
    lines = [table("Quantization check", [("", rows)]), *_layer_lines(found.layers)]
    lines += [f"note: {note}" for note in found.notes]
    match verdict(found, missed):
        case "good":
            lines.append(f"good: {options.quantized} keeps all thresholds")
        case "inconclusive":
            lines.append(
                "inconclusive: all thresholds are kept, which says nothing on texts that the base model does not know"
            )
        case "bad":
            lines += [f"bad: {line}" for line in missed]
    return "\n".join(lines)


def as_json(options: CheckOptions, found: Findings, missed: Sequence[str]) -> dict[str, Any]:
    """Figures under stable names; a figure that is not finite is null."""
    figures, scores, limits = found.divergence, found.scores, options.thresholds
    return {
        "verdict": verdict(found, missed),
        "failures": list(missed),
        "num_texts": found.texts,
        "num_tokens": figures.tokens,
        "kl": {
            "mean": _finite(figures.mean_kl),
            "standard_error": _finite(figures.standard_error),
            "median": _finite(figures.median_kl),
            "p99": _finite(figures.p99_kl),
            "max": _finite(figures.max_kl),
        },
        "top1_agreement": figures.top1_agreement,
        "perplexity": {
            "base": _finite(figures.base_perplexity),
            "quantized": _finite(figures.perplexity),
            "ratio": _finite(figures.perplexity_ratio),
        },
        "score": scores
        and {"questions": scores.questions, "base_percent": scores.base, "quantized_percent": scores.quantized},
        "layers": [
            {
                "name": layer.name,
                "errors": {name: _finite(error) for name, error in layer.errors.items()},
                "kl_alone": None if layer.kl is None else _finite(layer.kl),
            }
            for layer in found.layers
        ],
        "notes": list(found.notes),
        "thresholds": asdict(limits),
    }


def picture(found: Findings) -> str:
    """Errors by block, with a line for each kind of layer; the divergence of swapped layers; and its percentiles."""
    errors = [(layer, layer.worst[1]) for layer in found.layers if layer.worst]
    alone = [(layer, layer.kl) for layer in found.layers if layer.kl is not None]
    percentiles = [value if math.isfinite(value) else 0.0 for value in found.divergence.kl_percentiles]
    spread = Line("quantized", range(len(percentiles)), percentiles)
    panels = [Panel("KL divergence by percentile of the tokens", "percent of the tokens", "nats", [spread])]
    if errors:
        panels.append(Panel("Relative error of each layer's product", "block", "error", _lines_by_kind(errors)))
    if alone:
        bars = [value for _, value in alone]
        causes = Line("alone", range(len(bars) + 1), [*bars, bars[-1]], steps=True)
        title = f"KL divergence caused alone, the worst by {alone[0][0].name}"
        panels.append(Panel(title, "layers that were swapped", "nats", [causes]))
    return svg(panels)


def _layer_lines(layers: Sequence[LayerFinding]) -> list[str]:
    if not layers:
        return []
    lines = [f"{'Layers that hurt most':<44}{'error':>9}{'KL alone':>11}"]
    for layer in layers[:SHOWN_LAYERS]:
        name, error = layer.worst or (layer.name, None)
        shown = "-" if error is None else f"{error:.4f}"
        lines.append(f"{name:<44}{shown:>9}{'-' if layer.kl is None else f'{layer.kl:.5f}':>11}")
    return lines


def _lines_by_kind(errors: Sequence[tuple[LayerFinding, float]]) -> list[Line]:
    """A line for each kind of layer, named as within its block; layers outside blocks come after the last block."""
    places: dict[str, dict[int, float]] = {}
    blocks = [int(at[1]) for layer, _ in errors if (at := _BLOCK.search(layer.name))]
    behind = max(blocks, default=-1) + 1
    for layer, error in errors:
        at = _BLOCK.search(layer.name)
        kind = layer.name[at.end() :] if at else layer.name
        kind = "/".join(part.rpartition(".")[2] for part in kind.split("/"))
        places.setdefault(kind, {})[int(at[1]) if at else behind] = error if math.isfinite(error) else 0.0
    return [_line(kind, sorted(found.items())) for kind, found in sorted(places.items())]


def _line(name: str, points: Sequence[tuple[int, float]]) -> Line:
    if len(points) == 1:  # a step that is wide enough to be seen
        ((x, y),) = points
        return Line(name, [x, x + 1], [y, y], steps=True)
    return Line(name, [x for x, _ in points], [y for _, y in points])


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
