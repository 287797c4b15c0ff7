"""A plan for people, for programs and as a picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from quire.models.spec import ModelSpec
from quire.planning.costmodel.cards import CARDS
from quire.planning.footprint import GIB, format_bytes
from quire.tools.bench.report import Line, Panel, svg
from quire.tools.simulation.figures import Figures
from quire.tools.sizing.measured_rows import CheckedRow
from quire.tools.sizing.steady_state import Traffic
from quire.tools.sizing.survey import Candidate, MemoryRow

SHOWN = 10
"""Maximum number of candidates that are printed; the JSON has all."""


@dataclass(frozen=True)
class SizingPlan:
    """A plan for a model, with its name as asked, and for this traffic; the best candidate is the first. `rate` is in
    requests a second, or None if not known. `simulated` is the trace on the best candidate, or None without a trace."""

    name: str
    spec: ModelSpec
    traffic: Traffic
    rate: float | None
    memory: tuple[MemoryRow, ...]
    candidates: tuple[Candidate, ...]
    simulated: Figures | None


def as_text(plan: SizingPlan) -> str:
    spec, traffic = plan.spec, plan.traffic
    head = [
        f"{plan.name}: {spec.architecture}, {spec.num_parameters / 1e9:,.2f}B parameters, {len(spec.layers)} layers, "
        f"up to {spec.max_model_len:,} tokens",
        *_caches(spec),
        *_padding(spec),
        "",
        "Memory of each device, and how many sequences fit at a time by their length:",
        *columns(_memory_lines(plan.memory)),
        "",
        f"Prompts of {traffic.prompt:,} and outputs of {traffic.output:,} tokens; the best within the targets first:",
        *columns(_candidate_lines(plan)),
    ]
    left_out = len(plan.candidates) - SHOWN
    return "\n".join([*head, *([f"… {left_out} more, see --json"] if left_out > 0 else []), *_notes(plan)])


def as_json(plan: SizingPlan) -> dict[str, Any]:
    """Plain data under stable names."""
    return {
        "model": plan.name,
        "parameters": plan.spec.num_parameters,
        "kv_bytes_per_token": plan.spec.kv_bytes_per_token("bfloat16"),
        "state_bytes_per_sequence": plan.spec.state_bytes("bfloat16"),
        "input_len": plan.traffic.prompt,
        "output_len": plan.traffic.output,
        "request_rate": plan.rate,
        "memory": [asdict(row) for row in plan.memory],
        "candidates": [_candidate_json(plan, each) for each in plan.candidates],
        "simulated": None if plan.simulated is None else plan.simulated.as_json(),
    }


def picture(candidate: Candidate) -> str:
    """What a candidate reaches by its batch."""
    batches = [state.batch for state in candidate.reached]
    name = f"{_device(candidate)}, {candidate.format}"

    def panel(title: str, unit: str, values: Sequence[float]) -> Panel:
        return Panel(title, "sequences at a time", unit, [Line(name, batches, values)])

    return svg([
        panel("Output tokens a second", "tokens/s", [state.output_tokens_per_s for state in candidate.reached]),
        panel("Time to first token", "ms", [state.ttft_ms for state in candidate.reached]),
        panel("Time per output token", "ms", [state.tpot_ms for state in candidate.reached]),
    ])  # fmt: skip


def check_text(rows: Sequence[CheckedRow]) -> str:
    lines = [["model", "row", "measured", "predicted", "error"]]
    lines += [
        [r.measured.model, r.measured.row, f"{r.measured.value:,.4g} {r.measured.unit}", f"{r.predicted:,.4g}",
         f"{r.error:+.1%}"] for r in rows
    ]  # fmt: skip
    errors = sorted(abs(row.error) for row in rows)
    middle, worst = errors[len(errors) // 2], errors[-1]
    return "\n".join([*columns(lines), f"{len(rows)} rows: median error {middle:.1%}, worst {worst:.1%}"])


def _caches(spec: ModelSpec) -> list[str]:
    """Return lines about what layers cache of a token, and of a sequence."""
    lines = []
    if spec.kv_groups():
        bytes_each = spec.kv_bytes_per_token("bfloat16")
        lines.append(f"KV cache: {_cached(spec)} × 2 bytes = {bytes_each:,} bytes a token in bf16")
    if number := len(spec.state_layers):
        lines.append(f"States: {number} layers, {format_bytes(spec.state_bytes('bfloat16'))} a sequence in bf16")
    return lines


def _cached(spec: ModelSpec) -> str:
    """Return what layers cache, by their forms; those that read another layer's cache are not counted."""
    forms = Counter(layer.mixer.form for layer in spec.layers if layer.mixer.form.planes)
    shown = []
    for form, count in forms.items():
        planes = " + ".join(f"{plane.name} {' × '.join(map(str, plane.shape))}" for plane in form.planes)
        shown.append(f"{count} layers × ({planes})")
    return shown[0] if len(shown) == 1 else f"({' + '.join(shown)})"


def _padding(spec: ModelSpec) -> list[str]:
    """Return a line about the groups of layers that cache different amounts, and what they waste."""
    groups, parts = spec.kv_groups(), spec.block_parts
    if max(spec.block_entries, default=1) == 1:
        return []
    sizes = " and ".join(str(each) for each in dict.fromkeys(parts))
    unused = sum(1 - len(group.layers) / each for group, each in zip(groups, parts, strict=True)) / len(groups)
    return [f"Blocks: {len(groups)} groups of {sizes} layers, of which padding takes {unused:.1%}"]


def _memory_lines(rows: Sequence[MemoryRow]) -> list[list[str]]:
    lengths = sorted({length for row in rows for length in row.fits})
    lines = [["device", "weights", "GiB", "activations", "KV cache", "KV/token", *(f"{n:,}" for n in lengths)]]
    for row in rows:
        sizes = [f"{size / GIB:.2f}" for size in (row.weights, row.activations, row.kv_cache)]
        shown = [*sizes, f"{row.kv_bytes_per_token / 1024:g} KiB"] if row.weights else ["does not fit", "", "", ""]
        fits = [f"{row.fits[length]:,}" if row.fits.get(length) else "-" for length in lengths]
        lines.append([named(row.device, row.tp), row.format, *shown, *fits])
    return lines


def _candidate_lines(plan: SizingPlan) -> list[list[str]]:
    lines = [["device", "weights", "KV tokens", "batch", "TTFT ms", "TPOT ms", "tokens/s", "$/1M", "devices", "reason"]]
    for each in plan.candidates[:SHOWN]:
        kv = f"{each.deployment.kv_tokens:,}" if each.deployment else "-"
        best, cost = each.best, each.cost
        figures = ["-"] * 6
        if best is not None:
            figures = [
                str(best.batch), f"{best.ttft_ms:,.0f}", f"{best.tpot_ms:,.1f}", f"{best.output_tokens_per_s:,.0f}",
                "-" if cost is None else f"{cost:,.2f}", str(_devices(plan, each) or "-"),
            ]  # fmt: skip
        lines.append([_device(each), each.format, kv, *figures, _short(each.reason)])
    return lines


def _notes(plan: SizingPlan) -> list[str]:
    notes = []
    if (best := plan.candidates[0]).best is not None:
        notes.append(f"recommended: {_device(best)}, {best.format}, {best.best.batch} at a time")
    if (host := best.host) is not None:
        notes.append(
            f"host memory: {host.tokens:,} more tokens of prefixes; a prompt of {plan.traffic.prompt:,} is loaded in "
            f"{host.load_ms:,.1f} ms, and computed in {host.compute_ms:,.1f}"
        )
    if plan.simulated is not None:
        notes += ["The trace on the recommended one, simulated:", plan.simulated.as_text()]
    shown = {each.device for each in plan.candidates}
    notes.append("note: TTFT is that of an even flow of requests; bursts add to it.")
    if others := sorted(name for name in shown if name not in ("h200", "cpu")):
        notes.append(
            f"note: {', '.join(others)}: published figures, reached to the shares that were measured on an H200."
        )
    if "cpu" in shown:
        notes.append("note: cpu: a guess from its cores.")
    if any(each.tp > 1 and each.device in CARDS for each in plan.candidates):
        notes.append("note: several GPUs for one model: an estimate, from published latencies of all-reduces.")
    return ["", *notes]


def _candidate_json(plan: SizingPlan, each: Candidate) -> dict[str, Any]:
    return {
        "device": each.device,
        "tensor_parallel_size": each.tp,
        "format": each.format,
        "bytes": asdict(each.deployment.plan.footprint) if each.deployment else None,
        "kv_tokens": each.deployment.kv_tokens if each.deployment else None,
        "best": asdict(each.best) if each.best else None,
        "by_batch": [asdict(state) for state in each.reached],
        "price_per_hour": each.price,
        "cost_per_million_output_tokens": each.cost,
        "devices_for_rate": _devices(plan, each),
        "host_prefixes": asdict(each.host) if each.host else None,
        "reason": each.reason,
    }


def _devices(plan: SizingPlan, each: Candidate) -> int | None:
    if plan.rate is None or each.best is None:
        return None
    return each.tp * -int(-plan.rate // each.best.requests_per_s)


def _device(candidate: Candidate) -> str:
    return named(candidate.device, candidate.tp)


def named(device: str, tp: int) -> str:
    """Return the name of several devices of one kind."""
    return device if tp == 1 else f"{tp} × {device}"


def _short(text: str) -> str:
    return text if len(text) <= 100 else text[:99] + "…"


def columns(lines: Sequence[Sequence[str]]) -> list[str]:
    """Return aligned columns: the first two and the last to the left."""
    widths = [max(len(line[at]) for line in lines) for at in range(len(lines[0]))]
    last = len(widths) - 1

    def cell(at: int, text: str) -> str:
        return text.ljust(widths[at]) if at < 2 or at == last else text.rjust(widths[at])

    return ["  ".join(cell(at, text) for at, text in enumerate(line)).rstrip() for line in lines]
