"""One table: which function computes an op on which device.

All versions of an op have its name and the signature of its torch reference in `quire.compute.kernels.reference`, and a
test compares them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

_MODULES: dict[str, tuple[str | None, str | None]] = {
    "rms_norm": ("cpu.norm", "triton.norm"),
    "layer_norm": ("cpu.norm", "triton.norm"),
    "silu_and_mul": ("cpu.activation", "triton.activation"),
    "gelu_and_mul": ("cpu.activation", "triton.activation"),
    "gelu": ("cpu.activation", "triton.activation"),
    "soft_cap": ("cpu.activation", "triton.activation"),
    "embed": ("cpu.embedding", "triton.embedding"),
    "pack_tied": ("cpu.embedding", "reference.embedding"),
    "angles": ("cpu.embedding", "triton.embedding"),
    "take_rows": ("cpu.embedding", "reference.embedding"),
    "copy_stream": ("cpu.states", "reference.states"),
    "put_rows": ("cpu.states", "reference.states"),
    "state_rows": ("cpu.states", "reference.states"),
    "spread_columns": ("cpu.states", "reference.states"),
    "local_indices": ("cpu.embedding", "reference.embedding"),
    "sequence_lengths": ("cpu.rope_by_length", "reference.rotary"),
    "choose_frequencies": ("cpu.rope_by_length", "reference.rotary"),
    "grow_frequencies": ("cpu.rope_by_length", "reference.rotary"),
    "pack_linear": ("cpu.linear", "triton.linear.linear"),
    "linear": ("cpu.linear", "triton.linear.linear"),
    "linear_silu_and_mul": ("cpu.linear", "triton.linear.linear"),
    "route": ("cpu.experts", "triton.experts.experts"),
    "pack_experts": ("cpu.experts", "triton.experts.experts"),
    "experts": ("cpu.experts", "triton.experts.experts"),
    "expert_linear": ("cpu.experts", None),
    "coded_experts": ("reference.coded_experts", "triton.experts.coded_experts"),
    "adapted_experts": (None, "triton.experts.experts"),
    "adapted_coded_experts": (None, "triton.experts.coded_experts"),
    "group_adapted_pairs": (None, "triton.experts.expert_adapters"),
    "lora_of_pairs": (None, "triton.experts.expert_adapters"),
    "quantize_rows": ("reference.quantized_rows", "triton.linear.quantize_rows"),
    "rms_norm_quantized": ("reference.quantized_rows", "triton.quantized_rows"),
    "pack_scaled": ("cpu.scaled_linear", "reference.scaled_linear"),
    "scaled_linear": ("cpu.scaled_linear", "triton.linear.scaled"),
    "scaled_linear_silu_and_mul": ("cpu.scaled_linear", "triton.linear.scaled"),
    "pack_grouped": ("cpu.grouped_linear", "triton.linear.grouped"),
    "grouped_linear": ("cpu.grouped_linear", "triton.linear.grouped"),
    "grouped_linear_silu_and_mul": ("cpu.grouped_linear", "triton.linear.grouped"),
    "pack_codebook": ("reference.codebook_linear", "triton.linear.codebook"),
    "codebook_linear": ("reference.codebook_linear", "triton.linear.codebook"),
    "codebook_linear_silu_and_mul": ("reference.codebook_linear", "triton.linear.codebook"),
    "pack_blocks": ("cpu.blocks", None),
    "block_linear": ("cpu.blocks", None),
    "block_linear_silu_and_mul": ("cpu.blocks", None),
    "block_embed": ("cpu.blocks", None),
    "qk_norm_rope_and_cache": ("cpu.rowwise_attention", "triton.attention.qk_norm_rope"),
    "compute_slot_mapping": ("cpu.rowwise_attention", "triton.attention.slot_mapping"),
    "plan_kv_splits": (None, "triton.attention.decode_split_kv"),
    "decode_attention": (None, "triton.attention.decode_split_kv"),
    "prefill_attention": (None, "triton.attention.prefill"),
    "prefill_attention_split_kv": (None, "triton.attention.prefill_split_kv"),
    "gather_kv": (None, "triton.attention.gather_kv"),
    "prefill_attention_dense": (None, "triton.attention.prefill_dense"),
    "paged_attention": ("cpu.rowwise_attention", None),
    "sample": ("cpu.sample", "triton.sampling.sample"),
    "token_logprobs": ("reference.logprobs", "triton.sampling.logprobs"),
    "apply_penalties": ("reference.penalties", "triton.sampling.penalties"),
    "count_sampled": ("reference.penalties", "triton.sampling.penalties"),
    "apply_token_bitmask": ("cpu.sample", "triton.sampling.token_bitmask"),
    "copy_inputs_from_host": ("reference.host_transfer", "triton.host_transfer"),
    "copy_outputs_to_host": ("reference.host_transfer", "triton.host_transfer"),
    "prepare_inputs": ("cpu.step_inputs", "triton.step_inputs"),
    "init_slots": ("reference.step_inputs", "triton.step_inputs"),
    "position_columns": ("reference.drafts", "triton.drafts"),
    "keep_drafts": ("reference.drafts", "triton.drafts"),
    "look_up_tokens": ("reference.drafts", "triton.drafts"),
    "follow_slots": ("reference.drafts", "triton.drafts"),
    "note_drafts": ("reference.drafts", "triton.drafts"),
    "lora_shrink": ("cpu.lora", "triton.lora"),
    "linear_and_shrink": ("cpu.lora", "triton.lora_linear"),
    "lora_expand": ("cpu.lora", "triton.lora"),
    "lora_expand_silu_and_mul": ("cpu.lora", "triton.lora"),
    "lora_rms_norm": ("cpu.lora", "triton.lora_norm"),
    "move_blocks": ("reference.host_transfer", "triton.blocks"),
}
"""By op, where in this package its function for a CPU is, and that for a GPU; None: there is none."""
KERNELS: dict[tuple[str, str], str] = {
    (op, device): f"{__package__}.{module}:{op}"
    for op, modules in _MODULES.items()
    for device, module in zip(("cpu", "cuda"), modules, strict=True)
    if module is not None
}
"""By op and type of device, the function: "module:name"."""


def kernel(op: str, device: str) -> Callable[..., Any]:
    """The function for `op` on a device of type `device`; looked up once, when a layer is built."""
    module, name = KERNELS[op, device].split(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function
