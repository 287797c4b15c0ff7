"""The Llama architecture in plain torch, with Hugging Face's parameter names, for training on packed rows.

Owns the two configurations (Quill and its draft) and the forward pass; the trained weights are served by any engine
that knows ``LlamaForCausalLM``. There is no KV cache here: nothing is generated with this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from quill.tokenizer import CONTEXT, VOCABULARY

Mask = BlockMask | Tensor


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama model; the fields are named as in its config.json."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int = 64
    vocab_size: int = VOCABULARY
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0

    def __post_init__(self) -> None:
        assert self.num_attention_heads % self.num_key_value_heads == 0


QUILL = Shape(hidden_size=384, intermediate_size=896, num_hidden_layers=8, num_attention_heads=6, num_key_value_heads=2)
DRAFT = Shape(hidden_size=128, intermediate_size=352, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=2)


def document_mask(documents: Tensor) -> Mask:
    """Causal attention within documents [B, T]: sparse blocks on a GPU, a dense [B, 1, T, T] mask elsewhere."""
    rows, length = documents.shape
    if documents.is_cuda:

        def within(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (q >= k) & (documents[b, q] == documents[b, k])

        return _compiled_block_mask(within, rows, None, length, length, device=documents.device)
    causal = torch.ones(length, length, dtype=torch.bool, device=documents.device).tril()
    return causal & (documents[:, None, :, None] == documents[:, None, None, :])


_compiled_block_mask = torch.compile(create_block_mask)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim, self.groups = shape.head_dim, shape.num_attention_heads // shape.num_key_value_heads
        width, kv_width = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Mask) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = (
            project(x).view(rows, length, -1, self.head_dim).transpose(1, 2)  # [B, heads, T, head_dim]
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, rope), rotate(k, rope)
        k, v = k.repeat_interleave(self.groups, dim=1), v.repeat_interleave(self.groups, dim=1)
        if isinstance(mask, BlockMask):
            attended = flex_attention(q, k, v, block_mask=mask)
            assert isinstance(attended, Tensor)
        else:
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        out: Tensor = self.o_proj(attended.transpose(1, 2).reshape(rows, length, -1))
        return out


class FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.mlp = FeedForward(shape)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Mask) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope, mask)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Decoder(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)


class Llama(nn.Module):
    """``model.*`` holds all parameters; the embedding is tied to the output head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)
        cos, sin = _rope(shape)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.cos: Tensor
        self.sin: Tensor
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                # What writes into the residual stream starts small, as in GPT-2.
                writes = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * shape.num_hidden_layers) ** 0.5 if writes else 0.02)

    def forward(self, tokens: Tensor, mask: Mask) -> Tensor:
        """The last hidden states [B, T, hidden_size] of tokens [B, T]."""
        return self.streams(tokens, mask, ())[1]

    def streams(self, tokens: Tensor, mask: Mask, layers: Sequence[int]) -> tuple[list[Tensor], Tensor]:
        """The residual streams [B, T, hidden_size] that enter these layers, and what `forward` returns."""
        length = tokens.shape[1]
        x, entering = self.model.embed_tokens(tokens), {}
        for number, layer in enumerate(self.model.layers):
            if number in layers:
                entering[number] = x
            x = layer(x, (self.cos[:length], self.sin[:length]), mask)
        return [entering[number] for number in layers], self.model.norm(x)

    def logits(self, x: Tensor) -> Tensor:
        return F.linear(x, self.model.embed_tokens.weight)

    @property
    def parameter_count(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary position embedding (Su et al. 2021) of x [B, heads, T, head_dim], halves paired as Hugging Face does."""
    cos, sin = rope  # each [T, head_dim]
    left, right = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-right, left), dim=-1) * sin).to(x.dtype)


def _rope(shape: Shape) -> tuple[Tensor, Tensor]:
    frequencies = shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
    angles = torch.outer(torch.arange(CONTEXT).float(), frequencies).repeat(1, 2)  # [CONTEXT, head_dim]
    return angles.cos(), angles.sin()
