"""What Quire knows about a model that transformers' modules compute: plain data without torch, found by inspection.py.

Kept as JSON, since the process that plans and the one that computes both need it, and only the second imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Tier = Literal["paged", "own", "whole"]
"""How keys and values are kept: `paged` in Quire's KV cache, by Quire's attention; `own` in a cache that transformers
makes for each sequence, one sequence a forward; `whole` nowhere, since texts are computed whole."""


@dataclass(frozen=True)
class AttentionCall:
    """One call of the attention function in a forward.

    Attributes:
        heads, kv_heads: Numbers of query heads and KV heads.
        key_width, value_width: Widths of one head's keys and of its values.
        scale: Factor of the products of queries and keys.
        window: How many tokens a token sees, itself included; None: all tokens before it.
        cap: Bound c of scores, c · tanh(x / c); None: no bound.
    """

    heads: int
    kv_heads: int
    key_width: int
    value_width: int
    scale: float
    window: int | None = None
    cap: float | None = None


@dataclass(frozen=True)
class Description:
    """A model of transformers.

    Attributes:
        directory: The checkpoint's directory.
        architecture: The class.
        version: The version of transformers.
        tier: How keys and values are kept.
        reason: Why it is this tier.
        calls: The attention calls of a forward, in order; empty if `tier` is "own".
        is_separate: Whether the head can be computed apart from the decoder.
        hidden: Width of the hidden states that the head reads; the vocabulary's size if it is not separate.
        vocab_size: Number of logits.
        layers: Number of decoder layers.
        parameters: Number of weights.
        tied: Whether the head's weight is the embedding's.
        max_model_len: Longest sequence, in tokens; None: config.json does not say.
        bos_id: Beginning-of-sequence token.
        eos_ids: End-of-sequence tokens.
        token_elements: Elements that a sequence's own cache gains with each token; 0 if `tier` is "paged".
        sequence_elements: Elements of a sequence's own cache whatever its length.
        values_of: What a head makes values of, if `tier` is "whole": texts, or each token; empty: there is no head.
        token_types: Number of token types; 0: there are none.
    """

    directory: str
    architecture: str
    version: str
    tier: Tier
    reason: str
    calls: tuple[AttentionCall, ...]
    is_separate: bool
    hidden: int
    vocab_size: int
    layers: int
    parameters: int
    tied: bool
    max_model_len: int | None
    bos_id: int | None
    eos_ids: tuple[int, ...]
    token_elements: int = 0
    sequence_elements: int = 0
    values_of: Literal["", "text", "tokens"] = ""
    token_types: int = 0

    @property
    def kv_heads(self) -> int:
        """Number of KV heads of a layer in the paged cache: the largest of all calls."""
        return max(call.kv_heads for call in self.calls)

    @property
    def head_dim(self) -> int:
        """Width of a head in the paged cache: the largest of all keys and values, rounded up to an even number."""
        widest = max(max(call.key_width, call.value_width) for call in self.calls)
        return widest + widest % 2
