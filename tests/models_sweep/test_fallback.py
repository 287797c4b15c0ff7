"""Every causal language model of transformers, served by its own modules, against transformers itself.

What cannot be served must be refused by an error of Quire's; `--write-fallback PAGE` writes what was found to a page.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from quire import LLM, SamplingParams
from quire.errors import SetupError
from quire.foundation.config import environment
from quire.models.spec import read_spec
from tests.models.fallback.checkpoints import are_greedy, prompts
from tests.models_sweep.fallback_rows import config_of

_MOST = 5e7
"""Weights of the largest model that is tried: some parts have sizes of their own."""
Note = Callable[[str, object], None]
pytestmark = pytest.mark.models


def make(directory: Path, architecture: str, model_type: str) -> None:
    """Write a tiny checkpoint with random weights."""
    kind = getattr(transformers, architecture)
    with torch.device("meta"):
        size = sum(weight.numel() for weight in kind(config_of(model_type, kind.config_class)).parameters())
    if size > _MOST:
        raise ValueError(f"{size / 1e6:.0f}M weights")
    torch.manual_seed(0)
    model = kind(config_of(model_type, kind.config_class)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() >= 2 and weight.is_floating_point():
                weight.normal_(0, 0.12, generator=generator)
    model.save_pretrained(directory)


@pytest.mark.parametrize("model_type", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
def test_fallback(model_type: str, tmp_path: Path, record_property: Note, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "fallback_cache", lambda: tmp_path / "descriptions")
    torch.set_num_threads(1)
    architecture, directory, texts = (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type],
        tmp_path / "model",
        prompts(70, 9, 33),
    )
    record_property("model", (model_type, architecture))
    try:
        make(directory, architecture, model_type)
    except Exception as error:  # of transformers, whose checks of configs are of many kinds
        record_property("outcome", ("not built", _line(error)))
        pytest.skip(f"no tiny model: {_line(error)}")
    settings: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_num_batched_tokens": 32, "max_num_seqs": 4}
    settings |= {"max_model_len": 128, "kv_cache_memory_bytes": 8 << 20, "skip_tokenizer_init": True}
    try:
        llm = LLM(str(directory), model_impl="transformers", **settings)
    except SetupError as error:
        record_property("outcome", ("refused", _line(error)))
        return
    sampling = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    found = llm.generate([{"prompt_token_ids": text} for text in texts], sampling)
    llm.close()
    spec = read_spec(directory, None, "transformers").fallback
    assert spec is not None
    for text, each in zip(texts, found, strict=True):
        assert are_greedy(directory, text, list(each.outputs[0].token_ids))
    record_property("outcome", (spec.tier, spec.reason))


def _line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
