"""One table: which function computes an op on which device.

All versions of an op have the signature of its torch reference in `quire.kernels.reference`, and a test compares them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

KERNELS: dict[tuple[str, str], str] = {
    ("rms_norm", "cpu"): "quire.kernels.cpu.norm:rms_norm",
    ("layer_norm", "cpu"): "quire.kernels.cpu.norm:layer_norm",
    ("silu_and_mul", "cpu"): "quire.kernels.cpu.activation:silu_and_mul",
    ("gelu_and_mul", "cpu"): "quire.kernels.cpu.activation:gelu_and_mul",
    ("gelu", "cpu"): "quire.kernels.cpu.activation:gelu",
    ("soft_cap", "cpu"): "quire.kernels.cpu.activation:soft_cap",
    ("embed", "cpu"): "quire.kernels.cpu.embedding:embed",
    ("pack_tied", "cpu"): "quire.kernels.cpu.embedding:pack_tied",
    ("pack_tied", "cuda"): "quire.kernels.reference.embedding:pack_tied",
    ("angles", "cpu"): "quire.kernels.cpu.embedding:angles",
    ("rms_norm", "cuda"): "quire.kernels.triton.norm:rms_norm",
    ("layer_norm", "cuda"): "quire.kernels.triton.norm:layer_norm",
    ("silu_and_mul", "cuda"): "quire.kernels.triton.activation:silu_and_mul",
    ("gelu_and_mul", "cuda"): "quire.kernels.triton.activation:gelu_and_mul",
    ("gelu", "cuda"): "quire.kernels.triton.activation:gelu",
    ("soft_cap", "cuda"): "quire.kernels.triton.activation:soft_cap",
    ("embed", "cuda"): "quire.kernels.triton.embedding:embed",
    ("take_rows", "cpu"): "quire.kernels.cpu.embedding:take_rows",
    ("take_rows", "cuda"): "quire.kernels.reference.embedding:take_rows",
    ("local_tokens", "cpu"): "quire.kernels.cpu.embedding:local_tokens",
    ("local_tokens", "cuda"): "quire.kernels.reference.embedding:local_tokens",
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
    ("quantize_rows", "cpu"): "quire.kernels.reference.scaled_linear:quantize_rows",
    ("quantize_rows", "cuda"): "quire.kernels.triton.linear.quantize_rows:quantize_rows",
    ("scaled_linear", "cpu"): "quire.kernels.reference.scaled_linear:scaled_linear",
    ("scaled_linear", "cuda"): "quire.kernels.triton.linear.scaled:scaled_linear",
    ("scaled_linear_silu_and_mul", "cpu"): "quire.kernels.reference.scaled_linear:scaled_linear_silu_and_mul",
    ("scaled_linear_silu_and_mul", "cuda"): "quire.kernels.triton.linear.scaled:scaled_linear_silu_and_mul",
    ("pack_grouped", "cpu"): "quire.kernels.reference.grouped_linear:pack_grouped",
    ("pack_grouped", "cuda"): "quire.kernels.triton.linear.grouped:pack_grouped",
    ("grouped_linear", "cpu"): "quire.kernels.reference.grouped_linear:grouped_linear",
    ("grouped_linear", "cuda"): "quire.kernels.triton.linear.grouped:grouped_linear",
    ("grouped_linear_silu_and_mul", "cpu"): "quire.kernels.reference.grouped_linear:grouped_linear_silu_and_mul",
    ("grouped_linear_silu_and_mul", "cuda"): "quire.kernels.triton.linear.grouped:grouped_linear_silu_and_mul",
    ("pack_blocks", "cpu"): "quire.kernels.cpu.blocks:pack_blocks",
    ("block_linear", "cpu"): "quire.kernels.cpu.blocks:block_linear",
    ("block_linear_silu_and_mul", "cpu"): "quire.kernels.cpu.blocks:block_linear_silu_and_mul",
    ("block_embed", "cpu"): "quire.kernels.cpu.blocks:block_embed",
    ("qk_norm_rope_and_cache", "cpu"): "quire.kernels.cpu.rowwise_attention:qk_norm_rope_and_cache",
    ("qk_norm_rope_and_cache", "cuda"): "quire.kernels.triton.attention.qk_norm_rope:qk_norm_rope_and_cache",
    ("compute_slot_mapping", "cpu"): "quire.kernels.cpu.paged_attention:compute_slot_mapping",
    ("compute_slot_mapping", "cuda"): "quire.kernels.triton.attention.slot_mapping:compute_slot_mapping",
    ("plan_kv_splits", "cuda"): "quire.kernels.triton.attention.decode_split_kv:plan_kv_splits",
    ("decode_attention", "cuda"): "quire.kernels.triton.attention.decode_split_kv:decode_attention",
    ("prefill_attention", "cuda"): "quire.kernels.triton.attention.prefill:prefill_attention",
    (
        "prefill_attention_split_kv",
        "cuda",
    ): "quire.kernels.triton.attention.prefill_split_kv:prefill_attention_split_kv",
    ("gather_kv", "cuda"): "quire.kernels.triton.attention.gather_kv:gather_kv",
    ("prefill_attention_dense", "cuda"): "quire.kernels.triton.attention.prefill_dense:prefill_attention_dense",
    ("paged_attention", "cpu"): "quire.kernels.cpu.rowwise_attention:paged_attention",
    ("sample", "cpu"): "quire.kernels.cpu.sample:sample",
    ("sample", "cuda"): "quire.kernels.triton.sampling.sample:sample",
    ("token_logprobs", "cpu"): "quire.kernels.reference.logprobs:token_logprobs",
    ("token_logprobs", "cuda"): "quire.kernels.triton.sampling.logprobs:token_logprobs",
    ("apply_penalties", "cpu"): "quire.kernels.reference.penalties:apply_penalties",
    ("apply_penalties", "cuda"): "quire.kernels.triton.sampling.penalties:apply_penalties",
    ("count_sampled", "cpu"): "quire.kernels.reference.penalties:count_sampled",
    ("count_sampled", "cuda"): "quire.kernels.triton.sampling.penalties:count_sampled",
    ("apply_token_bitmask", "cpu"): "quire.kernels.cpu.token_bitmask:apply_token_bitmask",
    ("apply_token_bitmask", "cuda"): "quire.kernels.triton.sampling.token_bitmask:apply_token_bitmask",
    ("copy_inputs_from_host", "cpu"): "quire.kernels.reference.host_transfer:copy_inputs_from_host",
    ("copy_inputs_from_host", "cuda"): "quire.kernels.triton.host_transfer:copy_inputs_from_host",
    ("copy_outputs_to_host", "cpu"): "quire.kernels.reference.host_transfer:copy_outputs_to_host",
    ("copy_outputs_to_host", "cuda"): "quire.kernels.triton.host_transfer:copy_outputs_to_host",
    ("prepare_inputs", "cpu"): "quire.kernels.cpu.step_inputs:prepare_inputs",
    ("prepare_inputs", "cuda"): "quire.kernels.triton.step_inputs:prepare_inputs",
    ("init_slots", "cpu"): "quire.kernels.reference.step_inputs:init_slots",
    ("init_slots", "cuda"): "quire.kernels.triton.step_inputs:init_slots",
    ("move_blocks", "cpu"): "quire.kernels.reference.blocks:move_blocks",
    ("move_blocks", "cuda"): "quire.kernels.triton.blocks:move_blocks",
}


def kernel(op: str, device: str) -> Callable[..., Any]:
    """The function for `op` on a device of type `device`; looked up once, when a layer is built."""
    module, name = KERNELS[op, device].split(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function
