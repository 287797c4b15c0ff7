"""Cases of a layer's products and of the smaller ops around them: bf16, the sizes of Llama-3.1-8B, Gemma's vocabulary,
and the heads of Qwen3 with their norms."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.compute.kernels.dispatch import kernel
from quire.compute.kernels.reference.attention_inputs import CacheWrite, NormRopeForm, PagedKV, QKNormRope
from quire.tools.bench.kernel_cases import INT, ITEM, Arguments, KernelCase, normal, normals, scaled_normal

_HIDDEN, _WIDTH, _VOCABULARY = 4_096, 14_336, 256_000
_WEIGHTS = ((6_144, 4_096), (4_096, 4_096), (28_672, 4_096), (4_096, 14_336), (128_256, 4_096))
_GATED = (28_672, 4_096)
_BLOCK_SIZE = 16


# --- activations ----------------------------------------------------------------------------------------------------


def _gated(op: str, tokens: int, width: int) -> KernelCase:
    def make(device: torch.device) -> Arguments:
        return (normal(device, tokens, 2 * width), torch.empty(tokens, width, dtype=torch.bfloat16, device=device)), {}

    return KernelCase(op, f"{tokens} × {width}", make, 3 * tokens * width * ITEM)


def _gelu(tokens: int, width: int) -> KernelCase:
    def make(device: torch.device) -> Arguments:
        x = normal(device, tokens, width)
        return (x, torch.empty_like(x)), {}

    return KernelCase("gelu", f"{tokens} × {width}", make, 2 * tokens * width * ITEM)


def _capped(tokens: int, width: int) -> KernelCase:
    def make(device: torch.device) -> Arguments:
        return (normal(device, tokens, width), 30.0), {}

    return KernelCase("soft_cap", f"{tokens} × {width}", make, 2 * tokens * width * ITEM)


# --- norms ----------------------------------------------------------------------------------------------------------


def _rms(tokens: int, width: int, *, added: bool) -> KernelCase:
    def make(device: torch.device) -> Arguments:
        x, weight, delta = normals(device, (tokens, width), (width,), (tokens, width))
        return (x, weight, 1e-5, torch.empty_like(x), delta if added else None), {}

    moved = (4 if added else 2) * tokens * width + width  # x and delta in, x and out out
    return KernelCase("rms_norm", f"{tokens} × {width}{' after +=' if added else ''}", make, moved * ITEM)


def _rms_by_head(tokens: int, heads: int, width: int) -> KernelCase:
    def make(device: torch.device) -> Arguments:
        x, weight = normals(device, (tokens, heads, width), (heads, width))
        return (x, weight, 1e-6, torch.empty_like(x)), {}

    moved = 2 * tokens * heads * width + heads * width
    return KernelCase("rms_norm", f"{tokens} × {heads} × {width}", make, moved * ITEM)


def _layer_norm(tokens: int, width: int) -> KernelCase:
    def make(device: torch.device) -> Arguments:
        x, weight, bias, delta = normals(device, (tokens, width), (width,), (width,), (tokens, width))
        return (x, weight, bias, 1e-5, torch.empty_like(x), delta), {}

    return KernelCase("layer_norm", f"{tokens} × {width} after +=", make, (4 * tokens * width + 2 * width) * ITEM)


# --- queries, keys and values before attention ----------------------------------------------------------------------


_FORMS = {
    "": NormRopeForm(),
    ", interleaved and clipped": NormRopeForm(interleaved=True, clip=1.0),
    ", layer norm behind": NormRopeForm(centered=True, norm_last=True),
    ", normed values": NormRopeForm(values="normed"),
}


def _qk_norm_rope_and_cache(
    tokens: int, heads: int, kv_heads: int, d: int, *, normed: bool, form: str = ""
) -> KernelCase:
    def make(device: torch.device) -> Arguments:
        blocks = 2 * (tokens // _BLOCK_SIZE + 1)
        qkv, norm = normals(device, (tokens, heads + 2 * kv_heads, d), (heads + kv_heads, d))
        angles = torch.rand(tokens, d // 2, device=device) * 6.3
        keys, values = normals(device, *2 * [(blocks, _BLOCK_SIZE, kv_heads, d)])
        slot_mapping = torch.randperm(blocks * _BLOCK_SIZE, device=device)[:tokens]
        q = torch.empty(tokens, heads, d, dtype=qkv.dtype, device=device)
        angle = angles.cos().bfloat16(), angles.sin().bfloat16()
        norm_rope = QKNormRope(norm if normed else None, 1e-6, *angle, form=_FORMS[form])
        return (qkv, norm_rope, CacheWrite(PagedKV(keys, values), slot_mapping), q), {}

    moved = 2 * tokens * (heads + 2 * kv_heads) * d + tokens * d + normed * (heads + kv_heads) * d
    name = f"{tokens} × ({heads} + 2·{kv_heads}) × {d}{', normed' if normed else ''}{form}"
    return KernelCase("qk_norm_rope_and_cache", name, make, moved * ITEM + tokens * INT)


def _qk_mean_squares(tokens: int, heads: int, kv_heads: int, d: int) -> KernelCase:
    def make(device: torch.device) -> Arguments:
        qkv, out = normal(device, tokens, heads + 2 * kv_heads, d), torch.empty(tokens, 2, device=device)
        return (qkv, heads, kv_heads, 1, out), {}

    moved = tokens * (heads + kv_heads) * d
    return KernelCase("qk_mean_squares", f"{tokens} × ({heads} + {kv_heads}) × {d}", make, moved * ITEM)


def _gate_heads(tokens: int, heads: int, d: int, *, by_head: bool, activation: str) -> KernelCase:
    def make(device: torch.device) -> Arguments:
        each = 1 if by_head else d
        return (normal(device, tokens, heads, d), normal(device, tokens, heads, each), activation), {}

    moved = tokens * heads * (2 * d + (1 if by_head else d))
    name = f"{tokens} × {heads} × {d}, {activation}{' by head' if by_head else ''}"
    return KernelCase("gate_heads", name, make, moved * ITEM)


# --- products -------------------------------------------------------------------------------------------------------


def _linear(rows: int, outputs: int, columns: int, *, gated: bool = False) -> KernelCase:
    kept = outputs // 2 if gated else outputs

    def make(device: torch.device) -> Arguments:
        x, weight = scaled_normal(device, rows, columns), scaled_normal(device, outputs, columns)
        out = [torch.empty(rows, kept, dtype=x.dtype, device=device)] if gated else []
        return (x, kernel("pack_linear", device.type)(weight), None, *out), {}

    op, name = "linear_silu_and_mul" if gated else "linear", f"{rows} rows, {outputs} × {columns}"
    moved = outputs * columns + rows * (kept + columns)
    return KernelCase(op, name, make, moved * ITEM, 2 * rows * outputs * columns)


def _around(
    rows: Sequence[int], width: int, vocabulary: int, hidden: int, head_norms: tuple[int, int]
) -> tuple[KernelCase, ...]:
    return (
        *(_gated("silu_and_mul", tokens, width) for tokens in rows),
        *(_gated("gelu_and_mul", tokens, width) for tokens in rows),
        *(_gelu(tokens, width) for tokens in rows),
        _capped(rows[0], vocabulary),
        *(_rms(tokens, hidden, added=added) for tokens in rows for added in (True, False)),
        *(_rms_by_head(tokens, *head_norms) for tokens in rows),
        *(_layer_norm(tokens, hidden) for tokens in rows),
    )


def _attention(rows: Sequence[int], heads: int, kv_heads: int, d: int) -> tuple[KernelCase, ...]:
    return tuple(
        _qk_norm_rope_and_cache(tokens, heads, kv_heads, d, normed=normed)
        for normed in (False, True)
        for tokens in rows
    ) + tuple(
        case
        for tokens in rows
        for case in (
            _qk_mean_squares(tokens, heads, kv_heads, d),
            _gate_heads(tokens, heads, d, by_head=False, activation="sigmoid"),
            _gate_heads(tokens, heads, d, by_head=True, activation="softplus"),
        )
    )


def _products(
    rows: Sequence[int], weights: Sequence[tuple[int, int]], gated: tuple[int, int]
) -> tuple[KernelCase, ...]:
    return (
        *(_linear(count, *weight) for count in rows for weight in weights),
        *(_linear(count, *gated, gated=True) for count in rows),
    )


CASES = (
    *_around((1, 128, 2_048, 8_192), _WIDTH, _VOCABULARY, _HIDDEN, (40, 128)),
    *_attention((1, 32, 256, 2_048, 8_192), 32, 8, 128),
    *_products((1, 8, 32, 64, 128, 256, 2_048), _WEIGHTS, _GATED),
)
SMALL_CASES = (
    *_around((3,), 64, 100, 64, (2, 16)),
    *_attention((3,), 4, 2, 16),
    *(_qk_norm_rope_and_cache(3, 4, 2, 32, normed=True, form=form) for form in _FORMS if form),
    *_products((3,), ((64, 32),), (64, 32)),
)
