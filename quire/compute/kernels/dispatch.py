"""The table of ops: which function computes an op on which device.

All versions of an op have its name and the signature of its torch reference in `quire.compute.kernels.reference`, whose
docstring says what the arguments are; the docstring of a version only says what else it asks of them. Tests compare
versions with the reference.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

_OPS: dict[tuple[str | None, str | None], str] = {
    ("cpu.norm", "triton.norm"): "rms_norm layer_norm",
    ("cpu.activation", "triton.activation"): "silu_and_mul gelu_and_mul gelu soft_cap",
    ("cpu.activation", "reference.activation"): "gelu_exact gelu_exact_and_mul quick_gelu relu relu_squared",
    ("reference.activation", "reference.activation"): "xielu tanh",
    ("cpu.embedding", "triton.step_inputs"): "embed angles prepare_inputs",
    ("cpu.embedding", "reference.embedding"): "pack_tied take_rows local_indices",
    ("cpu.states", "reference.states"): "copy_stream multiply put_rows state_rows spread_columns",
    ("cpu.embedding", "reference.rotary"): "sequence_lengths shifted_positions choose_frequencies "
    "grow_frequencies query_scales",
    ("cpu.linear", "triton.linear.linear"): "pack_linear linear linear_silu_and_mul",
    ("cpu.linear", None): "pack_rounded",
    ("cpu.experts", "triton.experts.experts"): "route add_gated pack_experts experts",
    ("cpu.experts", None): "expert_linear",
    ("reference.experts", "triton.experts.experts"): "pack_coded_experts coded_experts",
    (None, "triton.experts.experts"): "adapted_experts adapted_coded_experts",
    (None, "triton.experts.expert_adapters"): "group_adapted_pairs lora_of_pairs",
    ("reference.quantized_rows", "triton.norm"): "quantize_rows rms_norm_quantized",
    ("cpu.scaled_linear", "reference.linear"): "pack_scaled",
    ("cpu.scaled_linear", "triton.linear.scaled"): "scaled_linear scaled_linear_silu_and_mul",
    ("cpu.grouped_linear", "triton.linear.grouped"): "pack_grouped grouped_linear grouped_linear_silu_and_mul",
    ("cpu.codebook_linear", "triton.linear.grouped"): "pack_codebook codebook_linear codebook_linear_silu_and_mul",
    ("cpu.blocks", None): "pack_blocks block_linear block_linear_silu_and_mul block_embed",
    ("cpu.rowwise_attention", "triton.attention.qk_norm_rope"): "qk_norm_rope_and_cache qk_mean_squares",
    ("cpu.output_gate", "triton.attention.output_gate"): "gate_heads",
    ("cpu.short_conv", "triton.recurrent.short_conv"): "short_conv",
    ("cpu.ssd_scan", "triton.recurrent.ssd_scan"): "ssd_scan",
    ("cpu.selective_scan", None): "selective_scan",
    ("cpu.gated_delta", "triton.recurrent.gated_delta"): "gated_delta",
    ("cpu.gated_norm", "triton.recurrent.gated_norm"): "gated_norm",
    ("cpu.rowwise_attention", "triton.attention.slot_mapping"): "compute_slot_mapping",
    (None, "triton.attention.decode_split_kv"): "plan_kv_splits decode_attention",
    (None, "triton.attention.prefill"): "prefill_attention",
    (None, "triton.attention.prefill_split_kv"): "prefill_attention_split_kv",
    (None, "triton.attention.gather_kv"): "gather_kv",
    (None, "triton.attention.prefill_dense"): "prefill_attention_dense",
    (None, "triton.attention.latents"): "decode_latents prefill_latents",
    ("cpu.latents", "triton.attention.latent_products"): "head_products latent_inputs",
    ("cpu.rowwise_attention", None): "paged_attention",
    ("cpu.sample", "triton.sampling.sample"): "sample",
    ("reference.logprobs", "triton.sampling.logprobs"): "token_logprobs",
    ("reference.penalties", "triton.sampling.logits_transforms"): "apply_penalties count_sampled",
    ("cpu.sample", "triton.sampling.logits_transforms"): "apply_token_bitmask",
    ("reference.host_transfer", "triton.host_transfer"): "copy_inputs_from_host copy_outputs_to_host move_blocks",
    ("reference.step_inputs", "triton.step_inputs"): "init_slots",
    ("cpu.drafts", "triton.drafts"): "position_columns verify_drafts",
    ("reference.drafts", "triton.drafts"): "look_up_tokens follow_slots note_drafts",
    ("cpu.lora", "triton.lora"): "lora_shrink lora_expand lora_expand_silu_and_mul",
    ("cpu.lora", "triton.lora_linear"): "linear_and_shrink",
    ("cpu.lora", "triton.lora_norm"): "lora_rms_norm",
}
"""Ops by the modules of this package that have their functions for a CPU and for a GPU; None: there is no function."""
KERNELS: dict[tuple[str, str], str] = {
    (op, device): f"{__package__}.{module}:{op}"
    for modules, ops in _OPS.items()
    for device, module in zip(("cpu", "cuda"), modules, strict=True)
    if module is not None
    for op in ops.split()
}
"""The function of each op and type of device, as "module:name"."""


def kernel(op: str, device: str) -> Callable[..., Any]:
    """Return the function for `op` on a device of type `device`; layers look it up once, when they are built."""
    module, name = KERNELS[op, device].split(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function
