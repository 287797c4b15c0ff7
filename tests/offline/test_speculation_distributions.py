"""10^5 tokens by each method of speculation: they follow the model's own distribution, as transformers has it.

Sequences of four tokens are counted whole, so that a token behind an accepted draft is held against its own prefix.
Chi-square at 1e-4 with fixed seeds, so it passes or fails for ever.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from quire import LLM, SamplingParams
from quire.engine.metrics.reader import Counter as Count
from tests.checkpoints import make_llama
from tests.heads import make_eagle3
from tests.mtp_heads import LAYOUTS, MtpReference
from tests.sampling.chi_square import critical, statistic
from tests.sampling.test_distributions import LEVEL, expected
from tests.worker.speculation.test_verification import plant_wrong_gains

pytestmark = pytest.mark.usefixtures("always_drafting")
TOKENS = 4
SEQUENCES = 25_000
ROWS = 50
VOCAB = 12
"""So few that what is sampled stands in the prompt."""
PROMPT = [*range(VOCAB), *reversed(range(VOCAB)), 3, 7, 3, 1, 5, 1]
METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1},
    "suffix": {"method": "suffix", "num_speculative_tokens": 3},
    "draft_model": {"num_speculative_tokens": 3},
    "eagle3": {"method": "eagle3", "num_speculative_tokens": 3},
    "mtp": {"method": "mtp", "num_speculative_tokens": 3},
}
LIMITS: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 64, "max_num_seqs": ROWS, "skip_tokenizer_init": True
}  # fmt: skip
SAMPLING: dict[str, Any] = {"temperature": 1.3, "top_k": 5, "top_p": 0.95, "min_p": 0.05}
"""Few enough tokens each time that whole sequences can be counted."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a head of its own."""
    directory = tmp_path_factory.mktemp("llama") / "model"
    make_llama(directory, layers=2, vocab_size=VOCAB, tokenizer=False, eos=VOCAB - 1, std=0.15)
    return MtpReference(directory, LAYOUTS["qwen3_next"]).directory


@pytest.fixture(scope="module")
def drafters(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The draft model is the model itself, which is always right; heads are nearly always wrong."""
    head = make_eagle3(tmp_path_factory.mktemp("head") / "head", vocab_size=VOCAB, sources=(0, 1, 2))
    return {"draft_model": {"model": str(checkpoint)}, "eagle3": {"model": str(head)}}


@pytest.fixture(scope="module")
def probabilities(checkpoint: Path) -> dict[tuple[int, ...], float]:
    """Of each sequence that may come, by its prefix's logits."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    known: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(TOKENS):
        with torch.no_grad():
            logits = model(torch.tensor([PROMPT + list(prefix) for prefix in known])).logits[:, -1]
        longer = {}
        for (prefix, probability), own in zip(known.items(), logits.tolist(), strict=True):
            for token, each in enumerate(expected(own, SAMPLING)):
                if each:
                    longer[*prefix, token] = probability * each
        known = longer
    return known


def drawn(llm: LLM, sequences: int) -> Counter[tuple[int, ...]]:
    """How often each one came. No more are asked for at once than run: there are no drafts while others wait."""
    params = [
        SamplingParams(max_tokens=TOKENS, ignore_eos=True, seed=seed, detokenize=False, **SAMPLING)
        for seed in range(sequences)
    ]
    seen: Counter[tuple[int, ...]] = Counter()
    for first in range(0, sequences, ROWS):
        some = params[first : first + ROWS]
        outputs = llm.generate([{"prompt_token_ids": PROMPT}] * len(some), some, use_tqdm=False)
        seen.update(tuple(output.outputs[0].token_ids) for output in outputs)
    return seen


def surprise(seen: Counter[tuple[int, ...]], probabilities: dict[tuple[int, ...], float]) -> float:
    """Above 1: not by chance."""
    sequences = seen.keys() | probabilities.keys()
    value, freedom = statistic([seen[each] for each in sequences], [probabilities.get(each, 0.0) for each in sequences])
    return value / critical(freedom, LEVEL)


@pytest.mark.long("engine")
@pytest.mark.parametrize("method", METHODS)
def test_tokens_follow_the_models_distribution(
    method: str, checkpoint: Path, drafters: dict[str, dict[str, Any]], probabilities: dict[tuple[int, ...], float]
) -> None:
    assert len(probabilities) > 50
    asked = METHODS[method] | drafters.get(method, {})
    with LLM(str(checkpoint), speculative_config=asked, disable_log_stats=False, **LIMITS) as llm:
        seen = drawn(llm, SEQUENCES)
        counts = {m.name: m.value for m in llm.get_metrics() if isinstance(m, Count)}
    assert surprise(seen, probabilities) < 1
    assert counts["vllm:spec_decode_num_draft_tokens"] > SEQUENCES
    assert method in ("eagle3", "mtp") or counts["vllm:spec_decode_num_accepted_tokens"] > SEQUENCES / 10


@pytest.mark.long("engine")
def test_one_token_too_many_is_noticed(
    checkpoint: Path, probabilities: dict[tuple[int, ...], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The token behind a rejected draft, which was sampled as if that had stayed."""
    plant_wrong_gains(1, monkeypatch)
    with LLM(str(checkpoint), speculative_config=METHODS["ngram"], **LIMITS) as llm:
        assert surprise(drawn(llm, SEQUENCES // 5), probabilities) > 1
