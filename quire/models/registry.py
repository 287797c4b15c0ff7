"""Which class builds which architecture: the `architectures` entry of config.json → "module:class".

A model that differs from a listed one by flags is one more line here; one that differs in `forward` is a file beside
`decoder.py`. Imports no torch.
"""

from __future__ import annotations

ARCHITECTURES: dict[str, str] = {
    "LlamaForCausalLM": "quire.models.decoder:Decoder",
}
