"""Queries, keys and values that one projection stores head by head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire.compute.mesh import Span
from quire.errors import CheckpointError
from quire.models.layers.attention import Heads
from quire.models.layers.qkv_layout import spans_of
from tests.checkpoints import edit_config, make_tiny
from tests.models.forward import logits_of

FALCON: dict[str, Any] = {
    "architecture": "FalconForCausalLM",
    "new_decoder_architecture": True,
    "num_kv_heads": 2,
    "hidden_size": 128,
    "num_attention_heads": 8,
}
TOKENS = torch.randint(3, 320, (40,), generator=torch.Generator().manual_seed(4))
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}


def test_rows_of_groups() -> None:
    heads = Heads(query=4, kv=2, width=8)  # stored: q0 q1 k0 v0 q2 q3 k1 v1
    every = spans_of("groups", heads, Span(0, 4), Span(0, 2))
    assert every == (Span(0, 16), Span(32, 16), Span(16, 8), Span(48, 8), Span(24, 8), Span(56, 8))
    assert spans_of("groups", heads, Span(2, 2), Span(1, 1)) == (Span(32, 32),)
    assert spans_of("groups", heads, Span(3, 1), Span(1, 1)) == (Span(40, 24),)


def test_rows_of_four_blocks() -> None:
    heads = Heads(query=8, kv=8, width=1)  # stored: q0 q1 v0 v1 k0 k1, and so on
    assert spans_of("four blocks", heads, Span(1, 2), Span(1, 2)) == (
        *(Span(1, 1), Span(6, 1)),
        *(Span(5, 1), Span(10, 1)),
        *(Span(3, 1), Span(8, 1)),
    )


@torch.inference_mode()
def test_weights_are_quantized_in_the_order_that_attention_needs(tmp_path: Path) -> None:
    directory = make_tiny(tmp_path, **FALCON)
    whole = logits_of(directory, TOKENS, torch.float32)
    coded = logits_of(directory, TOKENS, torch.float32, "fp8")
    assert 0 < float((coded - whole).norm() / whole.norm()) < 0.2


def test_forms_that_do_not_say_where_their_rows_are_are_refused(tmp_path: Path) -> None:
    directory = make_tiny(tmp_path, **FALCON)
    edit_config(directory, {"quantization_config": GPTQ})
    with pytest.raises(CheckpointError, match=r"query_key_value\.qweight.*head by head.*bf16"):
        logits_of(directory, TOKENS, torch.float32)
