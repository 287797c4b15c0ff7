"""Cases of ops with states: bf16, the sizes of LFM2-1.2B, Granite 4.0 H Small's Mamba2 and Qwen3-Next's delta nets."""

from __future__ import annotations

import torch

from quire.compute.kernels.reference.state_inputs import StateRows
from quire.tools.bench.kernel_cases import ITEM, Arguments, KernelCase, normal, normals

_FP32 = 4


def _rows(device: torch.device, rows: int, each: int) -> StateRows:
    states = torch.arange(1, rows + 1, device=device)
    return StateRows(states, torch.arange(0, rows * each + 1, each, device=device))


def _conv(rows: int, each: int, channels: int, kernel: int, *, gated: bool) -> KernelCase:
    def make(device: torch.device) -> Arguments:
        tokens = rows * each
        x, before, after = torch.split(normal(device, tokens, 3 * channels), channels, 1)
        weight, state = normals(device, (kernel, channels), (rows + 1, kernel - 1, channels))
        out = torch.empty(tokens, channels, dtype=torch.bfloat16, device=device)
        gates = {"before": before, "after": after} if gated else {}
        return (x, weight, None, state, _rows(device, rows, each), out), {"silu": not gated, **gates}

    moved = rows * each * channels * (4 if gated else 2) + 2 * rows * (kernel - 1) * channels
    return KernelCase("short_conv", f"{rows} × {each} × {channels}", make, moved * ITEM)


def _scan(rows: int, each: int, heads: int, p: int, n: int) -> KernelCase:
    def make(device: torch.device) -> Arguments:
        tokens = rows * each
        xbc, dt = normals(device, (tokens, heads * p + 2 * n), (tokens, heads))
        decay, ones = torch.full((heads,), -0.5, device=device), torch.ones(heads, device=device)
        state = torch.randn(rows + 1, heads, n, p, device=device)
        out = torch.empty(tokens, heads * p, dtype=torch.bfloat16, device=device)
        return (xbc, dt, decay, ones, ones, state, _rows(device, rows, each), out), {}

    moved = rows * each * (2 * heads * p + 2 * n + heads) * ITEM + 2 * rows * heads * n * p * _FP32
    return KernelCase(
        "ssd_scan", f"{rows} × {each} × {heads} × {n} × {p}", make, moved, 6 * rows * each * heads * n * p
    )


def _delta(rows: int, each: int, keys: int, values: int, width: int) -> KernelCase:
    def make(device: torch.device) -> Arguments:
        tokens, channels = rows * each, (2 * keys + values) * width
        qkv, a, b = normals(device, (tokens, channels), (tokens, values), (tokens, values))
        decay, bias = torch.full((values,), -0.5, device=device), torch.ones(values, device=device)
        state = torch.randn(rows + 1, values, width, width, device=device)
        out = torch.empty(tokens, values * width, dtype=torch.bfloat16, device=device)
        return (qkv, a, b, decay, bias, state, _rows(device, rows, each), out), {}

    moved = rows * each * (2 * keys + 2 * values) * width * ITEM + 2 * rows * values * width * width * _FP32
    flops = 8 * rows * each * values * width * width
    return KernelCase("gated_delta", f"{rows} × {each} × {values} × {width}²", make, moved, flops)


def _norm(tokens: int, width: int, group: int, *, norm_first: bool) -> KernelCase:
    def make(device: torch.device) -> Arguments:
        x, gate = normals(device, (tokens, width), (tokens, width))
        weight = normal(device, group if norm_first else width)
        return (x, gate, weight, 1e-5, group, torch.empty_like(x)), {"norm_first": norm_first}

    return KernelCase("gated_norm", f"{tokens} × {width} by {group}", make, 3 * tokens * width * ITEM)


_SHAPES = ((1, 1), (128, 1), (1, 8_192))
"""Rows, and tokens of each."""
CASES = (
    *(_conv(*shape, 2_048, 3, gated=True) for shape in _SHAPES),
    *(_conv(*shape, 8_192, 4, gated=False) for shape in _SHAPES),
    *(_scan(*shape, 128, 64, 128) for shape in _SHAPES),
    *(_delta(*shape, 16, 32, 128) for shape in _SHAPES),
    *(_norm(rows * each, 8_192, 8_192, norm_first=False) for rows, each in _SHAPES),
    *(_norm(rows * each, 4_096, 128, norm_first=True) for rows, each in _SHAPES),
)
SMALL_CASES = (
    *(_conv(*shape, 40, 3, gated=True) for shape in ((2, 1), (2, 5))),
    _scan(2, 3, 4, 16, 16),
    _delta(2, 3, 2, 4, 16),
    _norm(3, 64, 64, norm_first=False),
    _norm(3, 64, 16, norm_first=True),
)
