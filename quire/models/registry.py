"""Which class builds which architecture: the `architectures` entry of config.json → "module:class".

A model that differs from a listed one by flags is one more line here; one that differs in `forward` is a file beside
`decoder.py`. Imports no torch.
"""

from __future__ import annotations

ARCHITECTURES: dict[str, str] = {
    "LlamaForCausalLM": "quire.models.decoder:Decoder",
    "MistralForCausalLM": "quire.models.decoder:Decoder",
    "Qwen2ForCausalLM": "quire.models.decoder:Decoder",
    "Qwen3ForCausalLM": "quire.models.decoder:Decoder",
    "MixtralForCausalLM": "quire.models.decoder:Decoder",
    "Qwen3MoeForCausalLM": "quire.models.decoder:Decoder",
    "Phi3ForCausalLM": "quire.models.decoder:Decoder",
    "Gemma2ForCausalLM": "quire.models.gemma:Gemma",
    "Gemma3ForCausalLM": "quire.models.gemma:Gemma",
    "GPT2LMHeadModel": "quire.models.gpt2:GPT2",
}

HEADS: dict[str, str] = {
    "LlamaForCausalLMEagle3": "quire.models.eagle3:Eagle3Head",
    "Eagle3LlamaForCausalLM": "quire.models.eagle3:Eagle3Head",
}
"""Architectures of heads that propose tokens for another model → "module:class"; their layers are Llama's."""
