"""Tiny checkpoints of architectures that Quire has no layers for, and what transformers computes on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from tests.checkpoints import TINY, VOCAB_SIZE, make_tiny

SIZES = TINY | {"hidden_size": 64, "intermediate_size": 96}
STATES = {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "chunk_size": 8}
BAMBA = {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_chunk_size": 8,
    "attn_layer_indices": [1],
}  # fmt: skip

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    # by architecture: the tier, and what differs from SIZES
    "BioGptForCausalLM": ("paged", {}),
    "DiffLlamaForCausalLM": ("paged", {}),
    "ModernBertDecoderForCausalLM": ("paged", {"local_attention": 16, "num_hidden_layers": 3}),
    "DeepseekV2ForCausalLM": (
        "paged",
        {"num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
         "v_head_dim": 12, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_group": 2,
         "topk_group": 1, "first_k_dense_replace": 1, "topk_method": "greedy", "head_dim": 8},
    ),
    "BloomForCausalLM": ("own", {"n_head": 4, "n_layer": 2}),
    "XGLMForCausalLM": ("own", {"d_model": 64, "ffn_dim": 96, "num_layers": 2, "attention_heads": 4}),
    "CodeGenForCausalLM": ("own", {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8, "n_positions": 512}),
    "RobertaForCausalLM": ("own", {"is_decoder": True}),
    "Mamba2ForCausalLM": ("own", STATES),
    "BambaForCausalLM": ("own", BAMBA),
    "RwkvForCausalLM": ("own", {"attention_hidden_size": 64, "context_length": 512}),
    "OpenAIGPTLMHeadModel": ("own", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}),
}  # fmt: skip


def make(directory: Path, architecture: str, **config: Any) -> Path:
    """Write a tiny checkpoint of one of the cases, with weights wide enough that each term shows."""
    return make_tiny(directory, architecture, std=0.12, **SIZES | CASES.get(architecture, ("", {}))[1] | config)


def reference(directory: Path, tokens: list[int]) -> Tensor:
    """Return transformers' logits [tokens, vocab] of a whole sequence in fp32."""
    architecture = transformers.AutoConfig.from_pretrained(directory).architectures[0]
    kind = getattr(transformers, architecture)
    model = kind.from_pretrained(directory, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.inference_mode():
        logits: Tensor = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


def are_greedy(directory: Path, prompt: list[int], chosen: list[int]) -> bool:
    """Whether transformers gives none of the chosen tokens a smaller logit than another one, but for rounding."""
    logits = reference(directory, prompt + chosen)[len(prompt) - 1 : -1]
    of_chosen = logits.gather(-1, torch.tensor(chosen)[:, None])[:, 0]
    return bool((logits.amax(-1) - of_chosen <= 1e-4 * logits.abs().max()).all())


def prompts(*lengths: int, seed: int = 7) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]
