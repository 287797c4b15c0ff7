"""EAGLE-3 heads end to end: a head proposes what the paper's description says, and changes no output."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire import LLM, LoRARequest, SamplingParams
from quire.engine.metrics.reader import Counter
from quire.errors import CheckpointError, ConfigError, QuireError
from quire.foundation.config import Config
from quire.models.spec import read_spec
from quire.runtime.worker.replay import RecordedSteps
from quire.runtime.worker.step import Step
from tests.adapters import make_adapter
from tests.checkpoints import VOCAB_SIZE, make_llama
from tests.heads import Noted, ReferenceHead, make_eagle3, noting
from tests.offline import test_masked_drafts
from tests.offline.test_speculation import ASKED, LIMITS, answers, prompts

pytestmark = pytest.mark.usefixtures("always_drafting")
DRAFTS = 3


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama") / "model")


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_eagle3(tmp_path_factory.mktemp("head") / "head", vocab_size=VOCAB_SIZE, draft_vocab=200)


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> Iterator[LLM]:
    with LLM(str(checkpoint), **LIMITS) as llm:
        yield llm


@pytest.fixture(scope="module")
def guessing(checkpoint: Path, head: Path) -> Iterator[LLM]:
    with LLM(str(checkpoint), speculative_config=asking(head), disable_log_stats=False, **LIMITS) as llm:
        yield llm


def asking(head: Path, drafts: int = DRAFTS) -> dict[str, Any]:
    return {"method": "eagle3", "model": str(head), "num_speculative_tokens": drafts}


def counters(llm: LLM) -> dict[str, float]:
    return {metric.name: metric.value for metric in llm.get_metrics() if isinstance(metric, Counter)}


@pytest.mark.parametrize("asked", ASKED)
def test_a_head_changes_no_output(asked: str, plain: LLM, guessing: LLM) -> None:
    """With chunked prompts, a common prefix that is cached, and too few blocks for all."""
    assert answers(guessing, ASKED[asked]) == answers(plain, ASKED[asked])
    found = counters(guessing)
    assert found["vllm:num_preemptions"] > 0
    assert found["vllm:prefix_cache_hits"] > 0
    assert 0 < found["vllm:spec_decode_num_drafts"] <= found["vllm:spec_decode_num_draft_tokens"]


@pytest.fixture
def noted() -> Iterator[Noted]:
    with noting(prompts(1)[0][0]) as found:
        yield found


@pytest.mark.parametrize(
    "made",
    [
        {"draft_vocab": 200},
        {"sources": (2, 0, 1), "layer": "layers.0"},
        {"embedding": True, "norm_before_residual": True},
        {"sources": (1,), "eagle_aux_hidden_state_layer_ids": None,
         "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0], "use_aux_hidden_state": True}},
    ],
    ids=["part of the vocabulary", "order", "own embeddings", "one stream"],
)  # fmt: skip
def test_a_head_proposes_what_the_paper_says(
    made: dict[str, Any], checkpoint: Path, plain: LLM, tmp_path: Path, noted: Noted
) -> None:
    """Whatever its sequences went through: chunks, cached prefixes, preemption."""
    head = make_eagle3(tmp_path / "head", vocab_size=VOCAB_SIZE, **made)
    with LLM(str(checkpoint), speculative_config=asking(head), disable_log_stats=False, **LIMITS) as llm:
        for _ in range(2):  # then prompts are cached
            assert answers(llm, ASKED["greedy"]) == answers(plain, ASKED["greedy"])
        assert counters(llm)["vllm:num_preemptions"] > 0
    noted.check(ReferenceHead(head, checkpoint, made.get("sources", (0, 1, 2))))


@pytest.mark.parametrize("how", ["swapped", "copied"])
def test_states_go_with_their_blocks(how: str, checkpoint: Path, head: Path, plain: LLM, noted: Noted) -> None:
    """Swapped to the host and back; copied for a sequence that goes on from the prompt of another."""
    own: dict[str, Any] = {"preemption_mode": "swap", "swap_space": 0.01} if how == "swapped" else {}
    asked = {"temperature": 1.0, "top_k": 1, "seed": 1, "n": 1 if how == "swapped" else 3, "max_tokens": 30}
    with LLM(str(checkpoint), speculative_config=asking(head), **LIMITS, **own) as llm:
        assert answers(llm, asked) == answers(plain, asked)
    moves = [move for plan in noted.plans for move in (plan.swap_in if how == "swapped" else plan.copies)]
    assert len(moves) > 5
    noted.check(ReferenceHead(head, checkpoint), 5)


def learnt(head: Path, checkpoint: Path, texts: list[list[int]]) -> None:
    """Train the head of this directory until it knows what the model says after each beginning of these texts."""
    reference = ReferenceHead(head, checkpoint)
    for name, tensor in reference.weights.items():
        reference.weights[name] = tensor.requires_grad_() if tensor.is_floating_point() else tensor
    parameters = [each for each in reference.weights.values() if each.requires_grad]
    adam = torch.optim.Adam(parameters, lr=0.01)
    streams = [reference.streams(text[:-2]) for text in texts]
    for step in range(60):
        for text, states in zip(texts, streams, strict=True):
            out = reference.layer(torch.tensor(text[1:-1]), F.linear(states, reference.weights["fc.weight"]))
            logits = F.linear(reference._norm(out, "norm"), reference.weights["lm_head.weight"])
            loss = F.cross_entropy(logits[20:], torch.tensor(text[22:]))
            adam.zero_grad()
            torch.autograd.backward(loss)
            adam.step()
        if step > 5 and float(loss.detach()) < 0.02:
            break
    weights = {name: each.detach().contiguous() for name, each in reference.weights.items()}
    save_file(weights, head / "model.safetensors")


def test_a_head_that_has_learnt_the_texts_is_accepted(
    checkpoint: Path, plain: LLM, tmp_path: Path, noted: Noted
) -> None:
    """And still proposes what the paper says: nothing stays of what it computed behind drafts."""
    head = make_eagle3(tmp_path / "head", vocab_size=VOCAB_SIZE)
    some: list[Any] = [{"prompt_token_ids": each} for each in prompts(6)]
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True, detokenize=False)
    expected = [list(each.outputs[0].token_ids) for each in plain.generate(some, params, use_tqdm=False)]
    learnt(head, checkpoint, [[*prompt, *tokens] for prompt, tokens in zip(prompts(6), expected, strict=True)])
    with LLM(str(checkpoint), speculative_config=asking(head, 2), disable_log_stats=False, **LIMITS) as llm:
        accepted = []
        for _ in range(2):  # then prompts are cached
            before = counters(llm)
            found = [list(each.outputs[0].token_ids) for each in llm.generate(some, params, use_tqdm=False)]
            assert found == expected
            drafts, right = (
                counters(llm)[f"vllm:spec_decode_num_{name}"] - before[f"vllm:spec_decode_num_{name}"]
                for name in ("draft_tokens", "accepted_tokens")
            )
            accepted.append(right / drafts)
    assert min(accepted) > 0.45  # it was trained on first drafts only
    noted.check(ReferenceHead(head, checkpoint), 3)


def test_the_same_head_at_any_temperature(checkpoint: Path, plain: LLM, guessing: LLM) -> None:
    """Several sequences of a prompt, whose blocks they share and copy."""
    asked = {"temperature": 1.0, "seed": 7, "n": 4, "max_tokens": 20}
    assert answers(guessing, asked) == answers(plain, asked)


def test_steps_with_a_head_are_recorded(checkpoint: Path, head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both the model's, which hand out their streams, and the head's."""
    replayed: set[int] = set()
    replay = RecordedSteps.replay

    def noting(self: RecordedSteps, step: Step) -> Tensor:
        replayed.add(id(self))
        return replay(self, step)

    monkeypatch.setattr(RecordedSteps, "replay", noting)
    with LLM(str(checkpoint), speculative_config=asking(head), **LIMITS) as llm:
        answers(llm, ASKED["greedy"])
    assert len(replayed) == 2


def test_with_adapters(checkpoint: Path, head: Path, tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "adapter", checkpoint, seed=1, rank=4)
    own: dict[str, Any] = {**LIMITS, "enable_lora": True, "max_loras": 1}
    requests = [None, LoRARequest("a", 1, str(adapter))] * 3
    outputs, params = [], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, detokenize=False)
    for config in ({}, {"speculative_config": asking(head)}):
        with LLM(str(checkpoint), **own, **config) as llm:
            given: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts(6)]
            found = llm.generate(given, params, use_tqdm=False, lora_request=requests)
            outputs.append([each.outputs[0].token_ids for each in found])
    assert outputs[0] == outputs[1]


def test_structured_output_of_quill(tmp_path: Path) -> None:
    head = make_eagle3(tmp_path / "head", vocab_size=4096, hidden=384, eagle_aux_hidden_state_layer_ids=None)
    found = []
    for asked in ({}, {"speculative_config": asking(head)}):
        with LLM(**test_masked_drafts.LIMITS, **asked) as llm:
            found.append(test_masked_drafts.answers(llm, test_masked_drafts.ASKED["greedy"]))
            assert bool(asked) == (counters(llm)["vllm:spec_decode_num_drafts"] > 0)
    assert found[0] == found[1]


def broken(head: Path, tmp_path: Path, change: Any) -> Path:
    directory = tmp_path / "broken"
    directory.mkdir(parents=True)
    tensors = load_file(head / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_bytes((head / "config.json").read_bytes())
    return directory


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fc.weight", r"fc\.weight: missing, expected \[64, 192\]"),
        ("d2t", r"d2t: missing, expected \[200\]"),
        ("midlayer.hidden_norm.weight", r"midlayer\.hidden_norm\.weight: missing"),
        ("lm_head.weight", r"lm_head\.weight: missing, expected \[200, 64\]"),
    ],
)
def test_missing_weights_are_named(name: str, said: str, checkpoint: Path, head: Path, tmp_path: Path) -> None:
    directory = broken(head, tmp_path, lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=said):
        LLM(str(checkpoint), speculative_config=asking(directory), **LIMITS)


def test_wrong_token_ids_are_refused(checkpoint: Path, head: Path, tmp_path: Path) -> None:
    directory = broken(head, tmp_path, lambda tensors: tensors["d2t"].add_(VOCAB_SIZE))
    with pytest.raises(CheckpointError, match="d2t must name 200 tokens of 320"):
        LLM(str(checkpoint), speculative_config=asking(directory), **LIMITS)
    directory = broken(head, tmp_path / "other", lambda tensors: tensors["t2d"].logical_not_())
    with pytest.raises(CheckpointError, match="t2d and d2t name different tokens"):
        LLM(str(checkpoint), speculative_config=asking(directory), **LIMITS)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ({"vocab_size": VOCAB_SIZE + 8}, "has other tokens than the model"),
        ({"hidden": 32, "target_hidden_size": 32}, "hidden_size is 32, not 64"),
        ({"hidden": 32, "target_hidden_size": 64}, "is 32 wide, and has no embeddings of its own"),
        ({"eagle_aux_hidden_state_layer_ids": None}, "reads layers 2, 1, 0"),
        ({"sources": (0, 1, 9)}, "reads layers 0, 1, 9 of a model that has 3"),
        ({"norm_before_fc": True}, "'norm_before_fc' is True, it is not supported"),
        ({"num_hidden_layers": 2}, "a head has one layer"),
        ({"draft_vocab_size": 999}, "must be at most vocab_size"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state must be true"),
        ({"eagle_config": {"use_mtp_layernorm": True}}, "use_mtp_layernorm must be false"),
        ({"eagle_aux_hidden_state_layer_ids": "all"}, "must have a list of layer numbers"),
    ],
)
def test_heads_that_do_not_serve_are_refused(made: dict[str, Any], said: str, checkpoint: Path, tmp_path: Path) -> None:
    if "reads layers 2, 1, 0" in said:
        checkpoint = make_llama(tmp_path / "small", layers=2)
        said = "reads layers 2, 1, -1 of a model that has 2"
    head = make_eagle3(tmp_path / "head", **{"vocab_size": VOCAB_SIZE} | made)
    with pytest.raises(QuireError, match=said):
        LLM(str(checkpoint), speculative_config=asking(head), **LIMITS)


def test_heads_and_models_are_told_apart(checkpoint: Path, head: Path) -> None:
    with pytest.raises(ConfigError, match="is no head of EAGLE-3, but LlamaForCausalLM"):
        LLM(str(checkpoint), speculative_config=asking(checkpoint), **LIMITS)
    with pytest.raises(ConfigError, match='give it with "method": "eagle3"'):
        LLM(str(checkpoint), speculative_model=str(head), num_speculative_tokens=2, **LIMITS)
    with pytest.raises(ConfigError, match="is a head of EAGLE-3, no model"):
        LLM(str(head), **LIMITS)
    speculation = Config().with_values(speculative_config=asking(head)).speculation
    speculation.check_device("cpu", 2)
    with pytest.raises(ConfigError, match="not supported on several GPUs yet"):
        speculation.check_device("cuda", 2)
    with pytest.raises(ConfigError, match="pipeline-parallel-size 2"):
        speculation.check_device("cpu", 1, 2)


def test_what_a_head_takes_is_counted(tmp_path: Path, head: Path) -> None:
    """The weights of its files, as they are held."""
    for directory in (head, make_eagle3(tmp_path / "own", vocab_size=VOCAB_SIZE, embedding=True)):
        tensors = load_file(directory / "model.safetensors")
        assert read_spec(directory).num_parameters == sum(
            tensor.numel() for tensor in tensors.values() if tensor.is_floating_point()
        )
    assert json.loads((head / "config.json").read_text())["draft_vocab_size"] == 200
