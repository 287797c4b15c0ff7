"""One table: which function computes an op on which device.

All versions of an op have the signature of its torch reference in `quire.kernels.reference`, and a test compares them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

KERNELS: dict[tuple[str, str], str] = {
    ("rms_norm", "cpu"): "quire.kernels.reference.norm:rms_norm",
    ("layer_norm", "cpu"): "quire.kernels.reference.norm:layer_norm",
    ("silu_and_mul", "cpu"): "quire.kernels.reference.activation:silu_and_mul",
    ("gelu_and_mul", "cpu"): "quire.kernels.reference.activation:gelu_and_mul",
    ("gelu", "cpu"): "quire.kernels.reference.activation:gelu",
    ("soft_cap", "cpu"): "quire.kernels.reference.activation:soft_cap",
    ("embed", "cpu"): "quire.kernels.reference.embedding:embed",
    ("angles", "cpu"): "quire.kernels.reference.embedding:angles",
    ("rms_norm", "cuda"): "quire.kernels.triton.norm:rms_norm",
    ("layer_norm", "cuda"): "quire.kernels.triton.norm:layer_norm",
    ("silu_and_mul", "cuda"): "quire.kernels.triton.activation:silu_and_mul",
    ("gelu_and_mul", "cuda"): "quire.kernels.triton.activation:gelu_and_mul",
    ("gelu", "cuda"): "quire.kernels.triton.activation:gelu",
    ("soft_cap", "cuda"): "quire.kernels.triton.activation:soft_cap",
    ("embed", "cuda"): "quire.kernels.triton.embedding:embed",
    ("angles", "cuda"): "quire.kernels.triton.embedding:angles",
    ("pack_linear", "cpu"): "quire.kernels.cpu.linear:pack_linear",
    ("linear", "cpu"): "quire.kernels.cpu.linear:linear",
    ("linear_silu_and_mul", "cpu"): "quire.kernels.cpu.linear:linear_silu_and_mul",
    ("route", "cpu"): "quire.kernels.reference.experts:route",
    ("pack_experts", "cpu"): "quire.kernels.cpu.experts:pack_experts",
    ("experts", "cpu"): "quire.kernels.cpu.experts:experts",
    ("pack_linear", "cuda"): "quire.kernels.triton.linear.linear:pack_linear",
    ("linear", "cuda"): "quire.kernels.triton.linear.linear:linear",
    ("linear_silu_and_mul", "cuda"): "quire.kernels.triton.linear.linear:linear_silu_and_mul",
    ("route", "cuda"): "quire.kernels.triton.experts.experts:route",
    ("pack_experts", "cuda"): "quire.kernels.triton.experts.experts:pack_experts",
    ("experts", "cuda"): "quire.kernels.triton.experts.experts:experts",
    ("rotate_and_store", "cpu"): "quire.kernels.reference.paged:rotate_and_store",
    ("rotate_and_store", "cuda"): "quire.kernels.triton.attention.rotary:rotate_and_store",
    ("place_tokens", "cuda"): "quire.kernels.triton.attention.places:place_tokens",
    ("cut_contexts", "cuda"): "quire.kernels.triton.attention.decode:cut_contexts",
    ("attend_pieces", "cuda"): "quire.kernels.triton.attention.decode:attend_pieces",
    ("attend_tiles", "cuda"): "quire.kernels.triton.attention.chunk:attend_tiles",
    ("attend_parts", "cuda"): "quire.kernels.triton.attention.parts:attend_parts",
    ("gather_contexts", "cuda"): "quire.kernels.triton.attention.contexts:gather_contexts",
    ("attend_long", "cuda"): "quire.kernels.triton.attention.long:attend_long",
    ("attend_tokens", "cpu"): "quire.kernels.reference.paged:attend_tokens",
    ("attend_chunk", "cpu"): "quire.kernels.reference.paged:attend_chunk",
    ("draw", "cpu"): "quire.kernels.reference.sampling:draw",
    ("draw", "cuda"): "quire.kernels.triton.drawing.sampling:draw",
    ("token_logprobs", "cpu"): "quire.kernels.reference.logprobs:token_logprobs",
    ("token_logprobs", "cuda"): "quire.kernels.triton.drawing.logprobs:token_logprobs",
    ("penalize", "cpu"): "quire.kernels.reference.penalties:penalize",
    ("penalize", "cuda"): "quire.kernels.triton.drawing.penalties:penalize",
    ("count_drawn", "cpu"): "quire.kernels.reference.penalties:count_drawn",
    ("count_drawn", "cuda"): "quire.kernels.triton.drawing.penalties:count_drawn",
    ("fetch_columns", "cpu"): "quire.kernels.reference.pinned:fetch_columns",
    ("fetch_columns", "cuda"): "quire.kernels.triton.pinned:fetch_columns",
    ("send_outputs", "cpu"): "quire.kernels.reference.pinned:send_outputs",
    ("send_outputs", "cuda"): "quire.kernels.triton.pinned:send_outputs",
    ("begin_step", "cpu"): "quire.kernels.reference.step:begin_step",
    ("begin_step", "cuda"): "quire.kernels.triton.step:begin_step",
    ("seat_owners", "cpu"): "quire.kernels.reference.step:seat_owners",
    ("seat_owners", "cuda"): "quire.kernels.triton.step:seat_owners",
    ("move_blocks", "cpu"): "quire.kernels.reference.blocks:move_blocks",
    ("move_blocks", "cuda"): "quire.kernels.triton.blocks:move_blocks",
}


def kernel(op: str, device: str) -> Callable[..., Any]:
    """The function for `op` on a device of type `device`; looked up once, when a layer is built."""
    module, name = KERNELS[op, device].split(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function
