"""Models with an indexer are served where it selects all tokens: its weights are left out, and texts are as long."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from quire import LLM, SamplingParams
from quire.errors import ConfigError, ContextLengthError
from quire.foundation.config import Config
from quire.models.spec import read_spec
from quire.planning.step_limits import check_length, length_reason
from tests.checkpoints import edit_config, make_tiny
from tests.models.forward import logits_of
from tests.models_sweep.rows import ROWS, SHAPE
from tests.parity.oracle import Oracle

NAMES = ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM")
MOST = 24
"""How many tokens the indexer selects."""
TOKENS = torch.randint(3, 320, (2 * MOST,), generator=torch.Generator().manual_seed(4))


@pytest.fixture(scope="module", params=NAMES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = SHAPE | ROWS[request.param] | {"index_topk": MOST}
    return make_tiny(tmp_path_factory.mktemp("model"), request.param, **sizes)


@torch.inference_mode()
def test_up_to_so_many_tokens_attention_is_dense(checkpoint: Path) -> None:
    """Of more tokens, transformers' attention is another one: the length is limited for a reason."""
    ours, theirs = logits_of(checkpoint, TOKENS, torch.float32).double(), Oracle(checkpoint).logits(TOKENS.tolist())
    different = (ours - theirs).abs().amax(-1) / theirs.abs().max()
    assert different[:MOST].max() < 1e-4
    assert different[-1] > 1e-2


def test_the_length_and_its_reason(checkpoint: Path) -> None:
    spec, config = read_spec(checkpoint), Config()
    assert spec.max_model_len == MOST
    assert "index_topk" in length_reason(config, spec)
    with pytest.raises(ConfigError, match=rf"outside 2\.\.{MOST}, .*index_topk"):
        check_length(config.with_values(max_model_len=MOST + 1), spec)
    edit_config(checkpoint, {"index_topk": 1024})
    whole = read_spec(checkpoint)
    edit_config(checkpoint, {"index_topk": MOST})
    assert (whole.max_model_len, whole.length_limit) == (512, "")
    assert length_reason(config, whole) == "the model's limit"


def test_the_indexers_weights_are_left_out(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with LLM(
        str(checkpoint), dtype="float32", device="cpu", num_gpu_blocks_override=8, skip_tokenizer_init=True
    ) as llm:
        prompt = TOKENS[: MOST - 4].tolist()
        (output,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))
        assert len(output.outputs[0].token_ids) == 4
        with pytest.raises(ContextLengthError, match=f"maximum context length is {MOST} tokens"):
            llm.generate([prompt], SamplingParams(max_tokens=5))
    assert any("self_attn.indexer" in record.message for record in caplog.records)
