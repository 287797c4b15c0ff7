"""Every architecture in bfloat16: as near to transformers' fp32 logits as transformers' own bfloat16 is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.checkpoints import make_tiny
from tests.models.forward import logits_of
from tests.parity.cases import CASES


@pytest.mark.parametrize(
    "case", ["mistral, window, 4.x", "mixtral", "gemma2", "gemma3", "gpt2", "phi3", "qwen3, wide heads"]
)
@torch.inference_mode()
def test_bfloat16_is_as_near_as_transformers(case: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    directory = make_tiny(tmp_path, **CASES[case])
    tokens = torch.randint(3, 320, (120,), generator=torch.Generator().manual_seed(4))
    exact, theirs = (
        AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()(tokens.unsqueeze(0)).logits[0].float()
        for dtype in (torch.float32, torch.bfloat16)
    )
    ours = logits_of(directory, tokens, torch.bfloat16).float()
    assert (ours - exact).square().mean() < 1.3 * (theirs - exact).square().mean()
