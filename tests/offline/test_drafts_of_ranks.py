"""Speculation over ranks that divide a model: each rank drafts, and all say what one says without drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM
from quire.errors import ConfigError
from quire.offline import local_engine
from tests.checkpoints import VOCAB_SIZE, make_llama
from tests.executor.thread_ranks import ThreadRanks
from tests.heads import Noted, ReferenceHead, make_eagle3, noting
from tests.mtp_heads import LAYOUTS, MtpReference
from tests.offline.test_eagle3 import counters
from tests.offline.test_mtp import LIMITS
from tests.offline.test_speculation import ASKED, answers, prompts

pytestmark = pytest.mark.usefixtures("always_drafting")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama") / "model")


def check(monkeypatch: pytest.MonkeyPatch, model: Path, asked: dict[str, Any]) -> Noted:
    """Two ranks with drafts answer what one without answers, greedily and sampled. Returns what was proposed for greedy
    sequences."""
    torch.set_num_threads(1)
    with LLM(str(model), **LIMITS) as llm:
        expected = [answers(llm, ASKED[name]) for name in ("greedy", "seeded")]
    monkeypatch.setattr(local_engine, "build_executor", ThreadRanks)
    own = {"speculative_config": asked, "tensor_parallel_size": 2, "disable_log_stats": False}
    with LLM(str(model), **LIMITS, **own) as llm:
        with noting(prompts(1)[0][0]) as noted:
            assert answers(llm, ASKED["greedy"]) == expected[0]
        assert answers(llm, ASKED["seeded"]) == expected[1]
        found = counters(llm)
    assert found["vllm:num_preemptions"] > 0
    assert found["vllm:spec_decode_num_draft_tokens"] > 100
    if "model" in asked and asked["model"] == str(model):
        assert found["vllm:spec_decode_num_accepted_tokens"] > 0.9 * found["vllm:spec_decode_num_draft_tokens"]
    return noted


def test_a_draft_model(monkeypatch: pytest.MonkeyPatch, llama: Path) -> None:
    """It is the model itself, so that drafts are accepted."""
    check(monkeypatch, llama, {"model": str(llama), "num_speculative_tokens": 3})


def test_an_eagle3_head(monkeypatch: pytest.MonkeyPatch, llama: Path, tmp_path: Path) -> None:
    """What it is told of the model's streams are sums over ranks."""
    head = make_eagle3(tmp_path / "head", vocab_size=VOCAB_SIZE, draft_vocab=200)
    noted = check(monkeypatch, llama, {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3})
    noted.check(ReferenceHead(head, llama), 9)


@pytest.mark.parametrize(
    "layout", ["mimo", *(pytest.param(name, marks=pytest.mark.long("engine")) for name in ("deepseek", "qwen3_next"))]
)
def test_an_mtp_head(monkeypatch: pytest.MonkeyPatch, layout: str, tmp_path: Path) -> None:
    """Also with latents and experts, and with states, of which each rank has its part."""
    made = MtpReference(tmp_path, LAYOUTS[layout])
    noted = check(monkeypatch, tmp_path, {"method": "mtp", "num_speculative_tokens": 2})
    noted.check(made, 41)


def test_a_head_that_ranks_cannot_divide_is_refused(llama: Path, tmp_path: Path) -> None:
    head = make_eagle3(tmp_path / "head", vocab_size=VOCAB_SIZE, intermediate_size=97)
    asked = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3}
    with pytest.raises(ConfigError, match="which drafts, is divided like the model"):
        LLM(str(llama), tensor_parallel_size=2, speculative_config=asked, **LIMITS)
