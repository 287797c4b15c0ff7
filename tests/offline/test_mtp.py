"""Heads of multi-token prediction end to end: a head proposes what is published of it, and changes no output."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM
from quire.errors import ConfigError
from quire.foundation.config import Config
from quire.models.mtp import MtpHead
from quire.models.mtp_spec import mtp_head
from quire.models.spec import read_spec
from quire.planning.auto_config import resolve
from quire.runtime.worker.speculation.hidden_states import HeadStates
from tests.checkpoints import make_tiny
from tests.heads import Noted, noting
from tests.models_sweep.rows import ROWS, SHAPE
from tests.mtp_heads import LAYOUTS, MtpReference
from tests.offline.test_eagle3 import counters
from tests.offline.test_speculation import ASKED, answers, prompts

pytestmark = pytest.mark.usefixtures("always_drafting")
LIMITS: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 160, "max_num_seqs": 6, "max_num_batched_tokens": 48, "block_size": 8,
    "num_gpu_blocks_override": 40, "skip_tokenizer_init": True, "mamba_block_size": 16, "num_states_override": 40,
    "language_model_only": True,
}  # fmt: skip
"""So few blocks that sequences are preempted."""


def asking(drafts: int = 3, method: str = "mtp") -> dict[str, Any]:
    return {"speculative_config": {"method": method, "num_speculative_tokens": drafts}, "disable_log_stats": False}


@pytest.fixture(scope="module")
def mimo(tmp_path_factory: pytest.TempPathFactory) -> MtpReference:
    return MtpReference(tmp_path_factory.mktemp("mimo"), LAYOUTS["mimo"])


@pytest.fixture
def noted() -> Iterator[Noted]:
    with noting(prompts(1)[0][0]) as found:
        yield found


LONG = [pytest.mark.long("engine")]


@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=LONG * (name in ("deepseek", "qwen3_5", "qwen3_next", "nemotron"))) for name in LAYOUTS],
)
def test_a_head_proposes_what_is_published_and_changes_nothing(layout: str, tmp_path: Path, noted: Noted) -> None:
    """Whatever its sequences went through: chunks, cached prefixes, preemption."""
    made = MtpReference(tmp_path, LAYOUTS[layout])
    head = mtp_head(read_spec(tmp_path), tmp_path)
    assert head is not None
    assert head.num_parameters == made.num_parameters
    with LLM(str(tmp_path), **LIMITS) as llm:
        expected = answers(llm, ASKED["greedy"])
    with LLM(str(tmp_path), **LIMITS, **asking()) as llm:
        assert answers(llm, ASKED["greedy"]) == expected
        assert answers(llm, ASKED["greedy"]) == expected, "prompts are cached"
        assert counters(llm)["vllm:num_preemptions"] > 0
        assert counters(llm)["vllm:prefix_cache_hits"] > 0
    noted.check(made, 29)


@pytest.mark.parametrize("layout", ["mimo", "deepseek"])
def test_a_head_that_copies_the_model_is_always_right(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And seldom if it is given the token of the position before."""
    MtpReference(tmp_path, LAYOUTS[layout], planted=True)
    with LLM(str(tmp_path), **LIMITS, **asking()) as llm:
        answers(llm, ASKED["greedy"])
        found = counters(llm)
    assert found["vllm:spec_decode_num_accepted_tokens"] == found["vllm:spec_decode_num_draft_tokens"] > 100
    embed = MtpHead.embed
    monkeypatch.setattr(MtpHead, "embed", lambda self, tokens, positions: embed(self, tokens.roll(1), positions))
    with LLM(str(tmp_path), **LIMITS, **asking()) as llm:
        answers(llm, ASKED["greedy"])
        found = counters(llm)
    assert found["vllm:spec_decode_num_accepted_tokens"] < 0.5 * found["vllm:spec_decode_num_draft_tokens"]


def test_states_that_are_a_position_off_are_noticed(
    mimo: MtpReference, noted: Noted, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = HeadStates.take
    monkeypatch.setattr(HeadStates, "take", lambda self: take(self).roll(1, 0))
    with LLM(str(mimo.directory), **LIMITS, **asking()) as llm:
        answers(llm, ASKED["greedy"] | {"max_tokens": 10})
    with pytest.raises(AssertionError):
        noted.check(mimo, 5)


def test_sampled_drafts_change_no_output(mimo: MtpReference) -> None:
    """Several sequences of a prompt, whose blocks they share and copy."""
    asked = {"temperature": 1.0, "seed": 7, "n": 3, "max_tokens": 15}
    with LLM(str(mimo.directory), **LIMITS) as llm:
        expected = answers(llm, asked)
    with LLM(str(mimo.directory), **LIMITS, **asking(2, "mimo_mtp")) as llm:
        assert answers(llm, asked) == expected


def test_a_head_of_made_up_weights(tmp_path: Path) -> None:
    """config.json alone says that there is one."""
    row = ROWS["Glm4MoeForCausalLM"] | {"num_nextn_predict_layers": 1}
    make_tiny(tmp_path, "Glm4MoeForCausalLM", **SHAPE | row)
    (tmp_path / "model.safetensors").unlink()
    with LLM(str(tmp_path), load_format="dummy", **LIMITS, **asking()) as llm:
        answers(llm, ASKED["greedy"] | {"max_tokens": 5})
        assert counters(llm)["vllm:spec_decode_num_drafts"] > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "cpu"}, "no MTP head that Quire knows"),
        ({"device": "cpu", "model": "another"}, 'leave "model" out'),
    ],
)
def test_what_cannot_be_served_is_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    make_tiny(tmp_path, "Qwen3ForCausalLM", **SHAPE)
    own = {"method": "mtp"} | ({"model": settings.pop("model")} if "model" in settings else {})
    with pytest.raises(ConfigError, match=message):
        resolve(Config().with_values(model=str(tmp_path), speculative_config=own, **settings))


def test_settings_are_vllms() -> None:
    for method in ("mtp", "deepseek_mtp", "qwen3_next_mtp", "glm4_moe_mtp", "mimo_mtp", "ernie_mtp"):
        config = Config().with_values(speculative_config={"method": method}).speculation
        assert config.speculation is not None
        assert (config.speculation.method, config.speculation.tokens) == ("mtp", 1)
        with pytest.raises(ConfigError, match="on a CPU alone"):
            config.check_device("cuda", 1)
