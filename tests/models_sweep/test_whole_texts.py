"""Encoders of transformers that have no layers of Quire's own, served by its modules, against transformers itself.

What cannot be served must be refused by an error of Quire's.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES, MODEL_MAPPING_NAMES

from quire.errors import SetupError
from quire.foundation.config import environment
from quire.models.families.registry import NATIVE
from tests.models.fallback.test_whole_texts import MEAN, found_in, serving
from tests.models.pooled import near, texts
from tests.models_sweep.fallback_rows import config_of

ENCODERS = (
    *("big_bird", "convbert", "data2vec-text", "deberta", "deberta-v2", "ernie", "esm", "fnet", "funnel", "ibert"),
    *("layoutlm", "longformer", "luke", "megatron-bert", "mobilebert", "mpnet", "mra", "nystromformer", "rembert"),
    *("roberta-prelayernorm", "roc_bert", "roformer", "splinter", "squeezebert", "xlm-roberta-xl", "yoso"),
)
pytestmark = pytest.mark.models


@pytest.mark.parametrize("model_type", [name for name in ENCODERS if name in MODEL_MAPPING_NAMES])
@pytest.mark.parametrize("kind", ["states", "labels"])
@torch.inference_mode()
def test_encoders(model_type: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "fallback_cache", lambda: tmp_path / "descriptions")
    torch.set_num_threads(1)
    names = MODEL_MAPPING_NAMES if kind == "states" else MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    architecture = names.get(model_type)
    if not isinstance(architecture, str) or architecture in NATIVE:
        pytest.skip("there is no such class, or Quire has layers of its own")
    model_class = getattr(transformers, architecture)
    torch.manual_seed(0)
    model = model_class(config_of(model_type, model_class.config_class)).eval()
    model.save_pretrained(tmp_path / "model")
    rows = [row[:64] for row in texts()]
    try:
        llm = serving(tmp_path / "model", pooler_config=MEAN if kind == "states" else {"use_activation": False})
    except SetupError as error:
        pytest.skip(f"refused: {error.message[:200]}")
    with llm:
        for row, own in zip(rows, found_in(llm, rows), strict=True):
            output = model(row[None])
            near(own, output[0].mean(1)[0] if kind == "states" else output.logits[0], 1e-4)
